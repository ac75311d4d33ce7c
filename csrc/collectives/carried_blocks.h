// Exchanges between nodes in which every rank has blocks of its own: which rail carries whose block, and the base class
// of such exchanges.
//
// There are R rails. Rail k carries the blocks of the local ranks k, k + R, k + 2R, … of every node.
// Example: 2 rails, and a node with 5 ranks. Rail 0 carries the blocks of local ranks 0, 2 and 4, rail 1 those of 1
// and 3. That takes 3 turns: in turn 0 they carry 0 and 1, in turn 1 blocks 2 and 3, in turn 2 block 4.
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

  int carrierOf(int local) const { return static_cast<int>(local % rails_); }
  // The number of turns of the largest node. All nodes go turn by turn, so that no message waits for the credit of a
  // later one.
  int64_t mostTurns() const { return mostTurns_; }
  // The largest number of blocks, of all nodes together, that one rail carries.
  int64_t allTurns() const { return allTurns_; }
  // The local rank on node n whose block the rail carries in this turn, or -1 if it carries none.
  int local(int rail, int n, int64_t turn) const {
    const int64_t local = rail + turn * rails_;
    return local < static_cast<int64_t>(t_.node(n).size()) ? static_cast<int>(local) : -1;
  }
  // The number of blocks of node n that the rail carries.
  int64_t count(int rail, int n) const {
    return divideUp(static_cast<int64_t>(t_.node(n).size()) - rail, rails_);
  }

 private:
  const plan::Topology& t_;
  int64_t rails_;
  int64_t mostTurns_ = 0;
  int64_t allTurns_ = 0;
};

// The base class of these exchanges: one rank's view of the group, and the length of a block's chunks.
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

  // Chooses the length of chunks so that `pieces` of them fit into the staging memory. All nodes must cut alike, so
  // the caller counts pieces as if every node staged.
  void cutFor(int64_t pieces) {
    const plan::Limits& limits = b_.limits();
    const int64_t underWay = t_.numNodes() > 1 ? limits.fabricChunkBytes : limits.chunkBytes;
    chunkBytes_ = clipChunk(std::min({underWay, limits.messageBytes, limits.halfBytes / pieces}),
                            blockBytes_);
  }

  // The offset of the chunk of rank r's block in a buffer that has all blocks.
  int64_t place(Rank r, const plan::Chunk& c) const { return r * blockBytes_ + c.offset; }

  plan::Builder& b_;
  const plan::Topology& t_;
  int me_;
  int64_t blockBytes_;
  bool staged_;
  CarriedBlocks blocks_;
  std::vector<int> others_;
  int64_t depth_;  // the number of chunks by which one stage may run ahead of another (cutting.h)
  int64_t chunkBytes_ = 0;
};

}  // namespace smddp::collectives
