// One-shot reduce: the root sums all inputs.
//
//   1. copy in   Before it arrives, every rank except the root copies its input to its slot.
//   2. sum       When all have arrived, the root sums the slots and its own input, local ranks ascending, into
//                its output, which is the same buffer as its input.
//
// One synchronisation, the arrival; after it the others are done. The root reads L * M bytes, so this is for small
// vectors.
#include "collectives/algorithms.h"
#include "collectives/cutting.h"

namespace smddp::collectives {

plan::Plan reduceOneShot(const plan::Topology& t, const plan::Limits& limits, const Shape& shape) {
  SMDDP_CHECK(t.numNodes() == 1, "one-shot reduce is for one node");
  const int root = t.localOf(shape.root);
  plan::Builder b(t, limits, "one-shot reduce");
  const uint8_t pool = b.pool("contributions", 1, shape.bytes);
  const auto slot = [&](int mate) { return b.slot(pool, mate, 0, 0); };
  if (t.myLocal() != root) b.copy({slot(t.myLocal())}, b.in(0), shape.bytes);
  b.arrive();
  if (t.myLocal() != root) return b.done();

  b.stage("sum");
  std::vector<plan::Ref> contributions;
  for (int mate = 0; mate < t.teamSize(); ++mate) {
    contributions.push_back(mate == root ? b.in(0) : slot(mate));
  }
  b.reduce({b.out(0)}, contributions, shape.bytes, {.pre = true, .post = true});
  return b.done();
}

}  // namespace smddp::collectives
