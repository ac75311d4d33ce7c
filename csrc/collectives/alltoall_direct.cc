// All-to-all, one hop between nodes: every block goes straight to the node of its receiver, on the receiver's
// rail (block_transfer.h). If all nodes have equally many ranks, the block arrives at its receiver and goes straight
// to the receiver's output. With one node only "copy in" and "take" are left.
//
// 2 synchronisations a chunk, with shared buffers 2 in all. 1 network step; a rail sends L * M bytes for each
// receiver that it serves, (P-L) M altogether. A rank copies (P-1) M bytes to its slot, less the blocks that it
// sends itself, and P * M to its output; with shared buffers only the latter.
#include "collectives/algorithms.h"
#include "collectives/block_transfer.h"

namespace smddp::collectives {

plan::Plan alltoallDirect(const plan::Topology& t, const plan::Limits& limits, const Shape& shape) {
  plan::Builder b(t, limits, "direct alltoall");
  return BlockTransfer(b, shape).build();
}

}  // namespace smddp::collectives
