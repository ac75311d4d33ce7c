// Zero-copy allreduce: the buffers of all ranks lie in shared memory, so nothing is staged.
//
//   1. sum     When all have arrived, a rank sums its share of all inputs, local ranks ascending, and writes it to
//              all outputs. No other rank touches that share, so it also works in place.
//   2. finish  It waits until the others have done the same: they read its input and write its output.
//
// 2 synchronisations; a rank reads M bytes and writes M.
#include "collectives/algorithms.h"
#include "collectives/cutting.h"

namespace smddp::collectives {
namespace {

constexpr int kSummed = 1;

}  // namespace

plan::Plan allreduceZeroCopy(const plan::Topology& t, const plan::Limits& limits,
                             const Shape& shape) {
  SMDDP_CHECK(t.numNodes() == 1 && shape.shared,
              "zero-copy allreduce is for one node's shared buffers");
  const int me = t.myLocal();
  const plan::Range mine = plan::share({0, shape.bytes}, me, t.teamSize(), shape.bytes);
  plan::Builder b(t, limits, "zero-copy allreduce");
  b.shareBuffers();
  b.arrive();

  b.stage("sum");
  std::vector<plan::Ref> inputs, outputs;
  for (int mate = 0; mate < t.teamSize(); ++mate) {
    inputs.push_back(mate == me ? b.in(mine.offset) : b.mateIn(mate, mine.offset));
    outputs.push_back(mate == me ? b.out(mine.offset) : b.mateOut(mate, mine.offset));
  }
  b.reduce(outputs, inputs, mine.length, {.pre = true, .post = true});
  b.signal(kSummed, 1);
  b.waitMates(kSummed, 1);
  return b.done();
}

}  // namespace smddp::collectives
