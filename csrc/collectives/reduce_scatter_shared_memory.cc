// Reduce-scatter inside a node: block r of the sum goes to rank r.
//
// Staged, for each chunk of a block:
//   1. copy in  A rank copies the chunk of the others' blocks to its slot, when they have read the slot's previous
//               chunk. It reads its own block from its input.
//   2. sum      It sums its block over the team, local ranks ascending, into its output.
//
// Shared buffers:
//   1. sum      A rank sums its block of all inputs into its output,
//   2. finish   and waits until the others have done so, because they read its input.
//
// 2 synchronisations a chunk, or 2 in all; a rank copies (L-1) M bytes, or none, and reads L * M to
// sum.
#include "collectives/algorithms.h"
#include "collectives/cutting.h"

namespace smddp::collectives {
namespace {

constexpr int kCopied = 1;
constexpr int kSummed = 2;
constexpr int64_t kSlots = 2;

void sumInputs(plan::Builder& b, const Shape& shape) {
  const plan::Topology& t = b.topology();
  b.stage("sum");
  const int64_t block = t.me() * shape.bytes;
  std::vector<plan::Ref> inputs;
  for (int mate = 0; mate < t.teamSize(); ++mate) {
    inputs.push_back(mate == t.myLocal() ? b.in(block) : b.mateIn(mate, block));
  }
  b.reduce({b.out(0)}, inputs, shape.bytes, {.pre = true, .post = true});
  b.signal(kSummed, 1);
  b.waitMates(kSummed, 1);
}

void sumThroughSlots(plan::Builder& b, const Shape& shape) {
  const plan::Topology& t = b.topology();
  const int me = t.myLocal();
  // The slot holds a chunk of every block, so each block gets its part of chunkBytes.
  const int64_t chunkBytes = clipChunk(
      std::min(b.limits().chunkBytes, b.limits().halfBytes / kSlots) / t.teamSize(), shape.bytes);
  const uint8_t pool = b.pool("contributions", kSlots, t.teamSize() * chunkBytes);
  b.eachChunk(shape.bytes, chunkBytes, [&](const plan::Chunk& c) {
    b.stage("copy in");
    b.waitMates(kSummed, c.index + 1 - kSlots);
    for (int mate : otherMates(t)) {
      b.copy({b.slot(pool, me, c.index, mate * chunkBytes)},
             b.in(t.team()[mate] * shape.bytes + c.offset), c.length);
    }
    b.signal(kCopied, c.index + 1);

    b.stage("sum");
    b.waitMates(kCopied, c.index + 1);
    std::vector<plan::Ref> contributions;
    for (int mate = 0; mate < t.teamSize(); ++mate) {
      contributions.push_back(mate == me ? b.in(t.me() * shape.bytes + c.offset)
                                         : b.slot(pool, mate, c.index, me * chunkBytes));
    }
    b.reduce({b.out(c.offset)}, contributions, c.length, {.pre = true, .post = true});
    b.signal(kSummed, c.index + 1);
  });
}

}  // namespace

plan::Plan reduceScatterSharedMemory(const plan::Topology& t, const plan::Limits& limits,
                                     const Shape& shape) {
  SMDDP_CHECK(t.numNodes() == 1, "shared-memory reduce-scatter is for one node");
  plan::Builder b(t, limits, "shared-memory reduce_scatter");
  b.arrive();
  if (shape.shared) {
    b.shareBuffers();
    sumInputs(b, shape);
  } else {
    sumThroughSlots(b, shape);
  }
  return b.done();
}

}  // namespace smddp::collectives
