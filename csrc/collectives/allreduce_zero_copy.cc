// Zero-copy allreduce: the buffers of all ranks lie in memory that the node shares, so nothing is
// staged.
//
//   1. sum     once all have arrived, I sum my share of all inputs, local ranks ascending, and
//              write it to all outputs. Nobody else touches that share, in place or not.
//   2. finish  I wait until the others have done the same: they read my input and write my output.
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
  b.waitTeam(kSummed, 1);
  return b.done();
}

}  // namespace smddp::collectives
