// Broadcast inside a node. Input and output are the same buffer, so the root's buffer is only read.
//
// Staged, for each chunk:
//   1. copy in   The root copies the chunk to its slot when the others have read the slot's previous chunk.
//   2. copy out  The others copy it to their outputs.
//
// Shared buffers:
//   1. copy out  Every rank except the root copies the root's buffer to its own.
//   2. finish    The root waits until they have.
//
// 2 synchronisations a chunk, or 2 in all; the root copies M bytes or none, the others M.
#include "collectives/algorithms.h"
#include "collectives/cutting.h"

namespace smddp::collectives {
namespace {

constexpr int kFilled = 1;
constexpr int kRead = 2;
constexpr int64_t kSlots = 3;

void copyFromRoot(plan::Builder& b, const Shape& shape, int root) {
  const bool isRoot = b.topology().myLocal() == root;
  b.stage(isRoot ? "finish" : "copy out");
  if (isRoot) {
    b.waitMates(kRead, 1);
  } else {
    b.copy({b.out(0)}, b.mateIn(root, 0), shape.bytes);
    b.signal(kRead, 1);
  }
}

void copyThroughSlots(plan::Builder& b, const Shape& shape, int root) {
  const plan::Limits& limits = b.limits();
  const int64_t chunkBytes =
      clipChunk(std::min(limits.chunkBytes, limits.halfBytes / kSlots), shape.bytes);
  const uint8_t pool = b.pool("chunks", kSlots, chunkBytes);
  b.eachChunk(shape.bytes, chunkBytes, [&](const plan::Chunk& c) {
    const plan::Ref slot = b.slot(pool, root, c.index, 0);
    if (b.topology().myLocal() == root) {
      b.stage("copy in");
      b.waitMates(kRead, c.index + 1 - kSlots);
      b.copy({slot}, b.in(c.offset), c.length);
      b.signal(kFilled, c.index + 1);
    } else {
      b.stage("copy out");
      b.waitRank(root, kFilled, c.index + 1);
      b.copy({b.out(c.offset)}, slot, c.length);
      b.signal(kRead, c.index + 1);
    }
  });
}

}  // namespace

plan::Plan broadcastSharedMemory(const plan::Topology& t, const plan::Limits& limits,
                                 const Shape& shape) {
  SMDDP_CHECK(t.numNodes() == 1, "shared-memory broadcast is for one node");
  plan::Builder b(t, limits, "shared-memory broadcast");
  b.arrive();
  if (shape.shared) {
    b.shareBuffers();
    copyFromRoot(b, shape, t.localOf(shape.root));
  } else {
    copyThroughSlots(b, shape, t.localOf(shape.root));
  }
  return b.done();
}

}  // namespace smddp::collectives
