// The direct exchange between nodes: a parameter server that is spread over all ranks. Allreduce and
// reduce differ in which nodes get the results.
//
// Each rail's share of a chunk is cut into one shard per *server*. All nodes serve, unless shards
// would become so short that the cost of a message is not its bytes: then fewer do, and each rail
// begins with another node, so that the load stays level. When one server is left and one node
// gets the result, it is that node.
#pragma once

#include <vector>

#include "collectives/node_stages.h"

namespace smddp::collectives {

// The steps of one rank on a rail.
class DirectExchange {
 public:
  // How long a chunk should be.
  static int64_t preferredChunk(const plan::Topology& t, const plan::Limits& limits);

  DirectExchange(plan::Builder& b, NodeStages& node, const Shape& shape);

  // Stage "sum": my node's sum of my share, of which each server gets its shard.
  void sumAndScatter(const plan::Chunk& c);
  // Stage "serve": my shard of all nodes, summed in their order, goes to the nodes that get results.
  void serve(const plan::Chunk& c);
  // Stage "collect": the other servers' results.
  void collect(const plan::Chunk& c);
  // The slots may be used again by a later plan, which knows nothing of these puts.
  void finish();

 private:
  // Which shard node n serves, or none when it is >= numServers_.
  int shardIndex(int n) const { return (n - firstServer_ + t_.numNodes()) % t_.numNodes(); }
  bool serves(int n) const { return shardIndex(n) < numServers_; }
  bool getsResults(int n) const { return resultNode_ < 0 || n == resultNode_; }
  plan::Range shardOf(const plan::Chunk& c, int n) const {
    return node_.shard(c, shardIndex(n), numServers_);
  }

  plan::Builder& b_;
  const plan::Topology& t_;
  NodeStages& node_;
  int resultNode_ = -1;  // the only one that gets results, or -1
  int numServers_ = 1, firstServer_ = 0;
  bool iServe_ = false;
  std::vector<int> others_;
  std::vector<Rank> receivers_;  // on other nodes, of my results
};

}  // namespace smddp::collectives
