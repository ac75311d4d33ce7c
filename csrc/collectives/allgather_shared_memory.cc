// All-gather inside a node.
//
// Staged, for each chunk of a block:
//   1. copy in   A rank copies its input to its place in its output and to its slot, when the others have read the
//                slot's previous chunk.
//   2. copy out  It copies the others' chunks from their slots to their places.
//
// Shared buffers:
//   1. gather    A rank copies all inputs to their places in its output,
//   2. finish    and waits until the others have read its input.
//
// 2 synchronisations a chunk, or 2 in all; a rank copies (L+1) M bytes, or L * M.
#include "collectives/algorithms.h"
#include "collectives/cutting.h"

namespace smddp::collectives {
namespace {

constexpr int kFilled = 1;
constexpr int kGathered = 2;
constexpr int64_t kSlots = 3;

void gatherInputs(plan::Builder& b, const Shape& shape) {
  const plan::Topology& t = b.topology();
  b.stage("gather");
  b.copy({b.out(t.me() * shape.bytes)}, b.in(0), shape.bytes);
  for (int mate : otherMates(t)) {
    b.copy({b.out(t.team()[mate] * shape.bytes)}, b.mateIn(mate, 0), shape.bytes);
  }
  b.signal(kGathered, 1);
  b.waitMates(kGathered, 1);
}

void gatherThroughSlots(plan::Builder& b, const Shape& shape) {
  const plan::Topology& t = b.topology();
  const int64_t chunkBytes =
      clipChunk(std::min(b.limits().chunkBytes, b.limits().halfBytes / kSlots), shape.bytes);
  const uint8_t pool = b.pool("chunks", kSlots, chunkBytes);
  b.eachChunk(shape.bytes, chunkBytes, [&](const plan::Chunk& c) {
    b.stage("copy in");
    b.waitMates(kGathered, c.index + 1 - kSlots);
    b.copy({b.slot(pool, t.myLocal(), c.index, 0), b.out(t.me() * shape.bytes + c.offset)},
           b.in(c.offset), c.length);
    b.signal(kFilled, c.index + 1);

    b.stage("copy out");
    for (int mate : otherMates(t)) {
      b.waitRank(mate, kFilled, c.index + 1);
      b.copy({b.out(t.team()[mate] * shape.bytes + c.offset)}, b.slot(pool, mate, c.index, 0),
             c.length);
    }
    b.signal(kGathered, c.index + 1);
  });
}

}  // namespace

plan::Plan allgatherSharedMemory(const plan::Topology& t, const plan::Limits& limits,
                                 const Shape& shape) {
  SMDDP_CHECK(t.numNodes() == 1, "shared-memory all-gather is for one node");
  plan::Builder b(t, limits, "shared-memory allgather");
  b.arrive();
  if (shape.shared) {
    b.shareBuffers();
    gatherInputs(b, shape);
  } else {
    gatherThroughSlots(b, shape);
  }
  return b.done();
}

}  // namespace smddp::collectives
