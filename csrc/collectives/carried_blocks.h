// Exchanges between nodes in which every rank has blocks of its own: which rail carries whose block, and
// what such exchanges have in common.
//
// Local ranks beyond the rails are served by them in turn: rail k carries the blocks of the local
// ranks k, k + R, k + 2R, … of every node.
#pragma once

#include <vector>

#include "collectives/collective.h"
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

// The base of these exchanges: one rank's view of the group, and how long a chunk of a block may be.
class BlockExchange {
 public:
  int64_t chunkBytes() const { return chunkBytes_; }

 protected:
  BlockExchange(plan::Builder& b, const Shape& shape)
      : b_(b),
        t_(b.topology()),
        me_(t_.myLocal()),
        blockBytes_(shape.bytes),
        staged_(isStaged(t_, shape.shared)),
        blocks_(t_),
        others_(otherNodes(t_)),
        depth_(pipelineDepth(b.limits())) {
    if (shape.shared) b.shareBuffers();
  }

  // Chooses the length of chunks such that `pieces` of them fit into the staging memory. Nodes must
  // cut alike, so those are to be counted as if every node staged.
  void cutFor(int64_t pieces) {
    const plan::Limits& limits = b_.limits();
    const int64_t underWay = t_.numNodes() > 1 ? limits.fabricChunkBytes : limits.chunkBytes;
    chunkBytes_ = clipChunk(std::min({underWay, limits.messageBytes, limits.poolBytes / pieces}),
                            blockBytes_);
  }

  // Where the chunk of rank r's block lies in a buffer that has all blocks.
  int64_t place(Rank r, const plan::Chunk& c) const { return r * blockBytes_ + c.offset; }

  plan::Builder& b_;
  const plan::Topology& t_;
  int me_;
  int64_t blockBytes_;
  bool staged_;
  CarriedBlocks blocks_;
  std::vector<int> others_;
  int64_t depth_;  // chunks that stages may be apart
  int64_t chunkBytes_ = 0;
};

}  // namespace smddp::collectives
