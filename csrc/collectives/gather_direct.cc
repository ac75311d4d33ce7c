// Gather, one hop between nodes: every block goes straight to the root's node, on the rail of its sender
// (block_transfer.h), and there to the root. With one node only the copies inside the node are left.
//
// 2 synchronisations a chunk inside the root's node, 1 in other nodes that have ranks without a rail; with shared
// buffers 2 in all. 1 network step; a rail sends M bytes for each block that it carries. On the root's node a block
// is copied twice, the root's own once. With shared buffers each is copied once, by its sender or by the rank that
// received it.
#include "collectives/algorithms.h"
#include "collectives/block_transfer.h"

namespace smddp::collectives {

plan::Plan gatherDirect(const plan::Topology& t, const plan::Limits& limits, const Shape& shape) {
  plan::Builder b(t, limits, "direct gather");
  return BlockTransfer(b, shape).build();
}

}  // namespace smddp::collectives
