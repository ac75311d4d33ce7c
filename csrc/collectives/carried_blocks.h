// Which rail carries whose block, for collectives with one block per rank. Local ranks beyond the
// rails are served by them in turn: rail k carries the blocks of the local ranks k, k + R, k + 2R,
// … of every node.
#pragma once

#include <vector>

#include "collectives/cutting.h"

namespace smddp::collectives {

class CarriedBlocks {
 public:
  explicit CarriedBlocks(const plan::Topology& t) : t_(t), rails_(t.numRails()) {
    for (const auto& node : t.nodes()) {
      const int64_t turns = divideUp(static_cast<int64_t>(node.size()), rails_);
      mostTurns_ = std::max(mostTurns_, turns);
      allTurns_ += turns;
    }
  }

  int carrierOf(int local) const { return local % rails_; }
  // Blocks are carried in turns: first the rails' own, then those of the ranks beyond. Turn for
  // turn over all nodes, so that no message waits for the credit of a later one.
  int64_t mostTurns() const { return mostTurns_; }
  // The most blocks that one rail carries, of all nodes together.
  int64_t allTurns() const { return allTurns_; }
  // The local rank on node n whose block rail `rail` carries in this turn, or -1.
  int local(int rail, int n, int64_t turn) const {
    const int64_t local = rail + turn * rails_;
    return local < static_cast<int64_t>(t_.node(n).size()) ? static_cast<int>(local) : -1;
  }
  // How many blocks of node n the rail carries.
  int64_t count(int rail, int n) const {
    return divideUp(static_cast<int64_t>(t_.node(n).size()) - rail, rails_);
  }

 private:
  const plan::Topology& t_;
  int64_t rails_;
  int64_t mostTurns_ = 0;
  int64_t allTurns_ = 0;
};

}  // namespace smddp::collectives
