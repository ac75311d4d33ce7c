// Two-level reduce with the direct exchange (direct_exchange.h): the servers sum, the root's node collects.
//
// For each chunk, cut into one share per rail, and each share into one shard per server:
//
//   1. sum       inside the node I get the node's sum of my rail's share (node_stages.h)
//      scatter   and send each server its shard.
//   2. serve     If my node is a server: I wait for the other nodes' shards, sum them in the order
//                of nodes, and send the result to the root's node.
//   3. collect   There I wait for the results of the other servers,
//   4. gather    and the root gets every share.
//
// Two network steps; short vectors are summed by the root's node alone, in one. Every rank sends M/L (N-1)/N
// bytes and its shard's result M/(L*N); into the root's node come 2 M (N-1)/N altogether, where sending
// everything there would bring (N-1) M.
#include "collectives/algorithms.h"
#include "collectives/direct_exchange.h"

namespace smddp::collectives {

plan::Plan reduceDirect(const plan::Topology& t, const plan::Limits& limits, const Shape& shape) {
  plan::Builder b(t, limits, "direct reduce");
  NodeStages node(b, shape, DirectExchange::preferredChunk(t, limits));
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
