// Scatter, one hop between nodes: the root's node sends every block straight to the node of its receiver, on
// the receiver's rail (block_transfer.h). With one node the receivers copy their blocks from the root's slots.
//
// 2 synchronisations a chunk inside the root's node, and in the others only for ranks without a rail; with
// shared buffers 2 in all. 1 network step; a rail sends M bytes for each block that it carries. The root
// copies the blocks that it does not send itself once, and each receiver copies its block once. With shared buffers
// the root copies only its own block.
#include "collectives/algorithms.h"
#include "collectives/block_transfer.h"

namespace smddp::collectives {

plan::Plan scatterDirect(const plan::Topology& t, const plan::Limits& limits, const Shape& shape) {
  plan::Builder b(t, limits, "direct scatter");
  return BlockTransfer(b, shape).build();
}

}  // namespace smddp::collectives
