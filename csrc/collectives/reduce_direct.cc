// Two-level reduce with the direct exchange (direct_exchange.h): the servers sum, the root's node collects.
//
// For each chunk, cut into one share per rail, and each share into one shard per server:
//
//   1. sum       The rank on each rail gets its node's sum of its share (node_stages.h)
//      scatter   and sends each server its shard.
//   2. serve     If its node is a server, it waits for the other nodes' shards, sums them in the order
//                of nodes, and sends the result to the root's node.
//   3. collect   On the root's node it waits for the results of the other servers.
//   4. gather    The root gets every share.
//
// Two network steps; short vectors take one, because the root's node sums them alone. Every rank sends M/L (N-1)/N
// bytes, and M/(L*N) for the result of its shard. The root's node receives 2 M (N-1)/N bytes. It would receive
// (N-1) M if all nodes sent their sums there: with 8 nodes 1.75 M instead of 7 M.
#include "collectives/algorithms.h"
#include "collectives/direct_exchange.h"

namespace smddp::collectives {

plan::Plan reduceDirect(const plan::Topology& t, const plan::Limits& limits, const Shape& shape) {
  plan::Builder b(t, limits, "direct reduce");
  NodeStages node = DirectExchange::stagesFor(b, shape);
  DirectExchange exchange(b, node, shape);
  b.arrive();
  b.eachChunk(shape.bytes, node.chunkBytes(), [&](const plan::Chunk& c) {
    node.copyIn(c);
    if (t.onRail()) {
      exchange.sumAndScatter(c);
      exchange.serve(c);
      exchange.collect(c);
    }
    node.gather(c);
  });
  if (t.onRail()) exchange.finish();
  return b.done();
}

}  // namespace smddp::collectives
