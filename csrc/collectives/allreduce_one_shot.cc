// One-shot allreduce: every rank sums all inputs.
//
//   1. copy in   Before it arrives, a rank copies its input to its slot.
//   2. sum       When all have arrived, it sums the others' slots and its own input, local ranks ascending, into its
//                output. It does not read its own slot: the others are reading those cache lines.
//
// One synchronisation, the arrival. No rank has to wait at the end, because a slot is not used again before the
// execution after the next. Every rank reads (L-1) * M bytes of others, so this is for small vectors.
#include "collectives/algorithms.h"
#include "collectives/cutting.h"

namespace smddp::collectives {

plan::Plan allreduceOneShot(const plan::Topology& t, const plan::Limits& limits,
                            const Shape& shape) {
  SMDDP_CHECK(t.numNodes() == 1, "one-shot allreduce is for one node");
  plan::Builder b(t, limits, "one-shot allreduce");
  const uint8_t pool = b.pool("contributions", 1, shape.bytes);
  if (t.teamSize() > 1) b.copy({b.slot(pool, t.myLocal(), 0, 0)}, b.in(0), shape.bytes);
  b.arrive();

  b.stage("sum");
  std::vector<plan::Ref> contributions;
  for (int mate = 0; mate < t.teamSize(); ++mate) {
    contributions.push_back(mate == t.myLocal() ? b.in(0) : b.slot(pool, mate, 0, 0));
  }
  b.reduce({b.out(0)}, contributions, shape.bytes, {.pre = true, .post = true});
  return b.done();
}

}  // namespace smddp::collectives
