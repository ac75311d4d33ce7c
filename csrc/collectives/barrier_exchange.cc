// Barrier.
//
//   1. arrive    Every plan begins with the arrival. On one node it is the barrier.
//   2. exchange  With several nodes the first rank of each node then sends an empty message to the first
//                rank of every other node, waits for theirs,
//   3. release   and signals its mates.
//
// 1 synchronisation; with several nodes 1 step and a second synchronisation.
#include "collectives/algorithms.h"
#include "collectives/cutting.h"

namespace smddp::collectives {
namespace {

constexpr int kExchanged = 1;
constexpr int kLeader = 0;

}  // namespace

plan::Plan barrierExchange(const plan::Topology& t, const plan::Limits& limits, const Shape&) {
  plan::Builder b(t, limits, "barrier");
  b.arrive();
  if (t.numNodes() == 1) return b.done();

  b.stage("exchange");
  if (t.myLocal() != kLeader) {
    b.waitRank(kLeader, kExchanged, 1);
    return b.done();
  }
  for (int node : otherNodes(t)) b.put(t.railPeer(node), 0, b.in(0), 0);
  for (int node : otherNodes(t)) {
    b.receive(t.railPeer(node), 0, 0);
    b.release(t.railPeer(node), 0);
  }
  b.signal(kExchanged, 1);  // no flush: an empty message has no source
  return b.done();
}

}  // namespace smddp::collectives
