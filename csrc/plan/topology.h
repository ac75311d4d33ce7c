// Topology says which ranks of a group share a node. It is arithmetic only.
//
// A *rail* is the set of ranks with the same local index on every node: between nodes, rank k of a node talks
// only to rank k of the others. Nodes may have different numbers of ranks. The group then has as many rails as its
// smallest node has ranks; the other ranks exchange data only within their node.
// Example: nodes {0, 1, 2} and {3, 4} have two rails, {0, 3} and {1, 4}. Rank 2 is on no rail.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/types.h"

namespace smddp::plan {

class Topology {
 public:
  // nodes[n] holds the group ranks on node n, in ascending order; every rank 0..P-1 occurs once. Nodes are ordered
  // by their lowest rank, so that all ranks number them alike.
  Topology(std::vector<std::vector<Rank>> nodes, Rank me) : nodes_(std::move(nodes)), me_(me) {
    size_t count = 0;
    for (const auto& node : nodes_) count += node.size();
    where_.assign(count, {-1, -1});
    for (int n = 0; n < static_cast<int>(nodes_.size()); ++n) {
      for (int l = 0; l < static_cast<int>(nodes_[n].size()); ++l) {
        const Rank r = nodes_[n][l];
        SMDDP_CHECK(r >= 0 && r < numRanks() && where_[r].node < 0, "rank {} is misplaced", r);
        where_[r] = {n, l};
      }
    }
    SMDDP_CHECK(me >= 0 && me < numRanks(), "rank {} is not among {} ranks", me, numRanks());
  }

  // Takes one node name per rank. Ranks with equal names share a node.
  static Topology fromNames(const std::vector<std::string>& nodeOfRank, Rank me) {
    std::map<std::string, int> number;
    std::vector<std::vector<Rank>> nodes;
    for (Rank r = 0; r < static_cast<Rank>(nodeOfRank.size()); ++r) {
      const auto [it, isNew] = number.try_emplace(nodeOfRank[r], static_cast<int>(nodes.size()));
      if (isNew) nodes.emplace_back();
      nodes[it->second].push_back(r);
    }
    return {std::move(nodes), me};
  }

  Rank me() const { return me_; }
  int numRanks() const { return static_cast<int>(where_.size()); }
  int numNodes() const { return static_cast<int>(nodes_.size()); }
  int nodeOf(Rank r) const { return where_[r].node; }
  int localOf(Rank r) const { return where_[r].local; }
  int myNode() const { return nodeOf(me_); }
  int myLocal() const { return localOf(me_); }
  // The ranks on node n, by local index.
  const std::vector<Rank>& node(int n) const { return nodes_[n]; }
  const std::vector<Rank>& team() const { return nodes_[myNode()]; }
  int teamSize() const { return static_cast<int>(team().size()); }
  int numRails() const {
    size_t least = nodes_.front().size();
    for (const auto& node : nodes_) least = std::min(least, node.size());
    return static_cast<int>(least);
  }
  // Every node has one rank.
  bool isFlat() const { return numRanks() == numNodes(); }
  bool onRail() const { return myLocal() < numRails(); }
  // The rank on node n that shares my rail. Only a rank on a rail may ask.
  Rank railPeer(int n) const {
    const auto local = static_cast<size_t>(myLocal());
    SMDDP_CHECK(local < nodes_[n].size(), "rank {} has no peer on node {}", me_, n);
    return nodes_[n][local];
  }
  Topology seenBy(Rank other) const { return {nodes_, other}; }
  const std::vector<std::vector<Rank>>& nodes() const { return nodes_; }

 private:
  struct Place {
    int node, local;
  };
  std::vector<std::vector<Rank>> nodes_;
  std::vector<Place> where_;
  Rank me_;
};

}  // namespace smddp::plan
