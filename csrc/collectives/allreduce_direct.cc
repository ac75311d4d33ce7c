// Two-level allreduce with the direct exchange (direct_exchange.h).
//
// Each chunk is cut into one share per rail, and each share into one shard per *server*. The stages for a chunk are:
//
//   1. sum       The rank on each rail gets its node's sum of its share (node_stages.h)
//                and sends each server its shard.
//   2. serve     If its node is a server, it waits for the other nodes' shards, sums them in the order
//                of nodes, and sends the result back to all of them.
//   3. collect   It waits for the results of the other servers.
//   4. gather    Inside the node every rank gets every share.
//
// Two network steps, however many nodes there are; every rank sends 2 M/L (N-1)/N bytes, as in a
// ring.
#include "collectives/algorithms.h"
#include "collectives/direct_exchange.h"

namespace smddp::collectives {

plan::Plan allreduceDirect(const plan::Topology& t, const plan::Limits& limits,
                           const Shape& shape) {
  plan::Builder b(t, limits, "direct allreduce");
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
