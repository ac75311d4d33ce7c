// Reduce inside a node: every rank sums its share, and the root collects the shares. Input and output of
// the root are the same buffer; the inputs of the others are only read.
//
// Staged, for each chunk, cut into one share per rank:
//   1. copy in   A rank copies the others' shares of its input to its slot. It reads its own share from the input.
//   2. sum       It sums its share over the team, local ranks ascending: the root into its output, the others into
//                their slots, where the place of that share is still free.
//   3. copy out  The root copies the others' sums from their slots to its output.
//
// Shared buffers:
//   1. sum       A rank sums its share of all inputs into the root's output. No other rank touches that share.
//   2. finish    It waits until the others have done the same, because they read its input.
//
// Staged: 3 synchronisations a chunk; a rank copies M (L-1)/L bytes, the root twice that, and reads M to sum.
// Shared: 2 synchronisations in all; a rank copies nothing and reads M.
#include "collectives/algorithms.h"
#include "collectives/cutting.h"

namespace smddp::collectives {
namespace {

constexpr int kCopied = 1;
constexpr int kSummed = 2;
constexpr int kGathered = 3;  // the root's
constexpr int64_t kSlots = 3;

void sumInputs(plan::Builder& b, const Shape& shape, int root) {
  const plan::Topology& t = b.topology();
  const int me = t.myLocal();
  const plan::Range mine = plan::share({0, shape.bytes}, me, t.teamSize(), shape.bytes);
  b.stage("sum");
  std::vector<plan::Ref> inputs;
  for (int mate = 0; mate < t.teamSize(); ++mate) {
    inputs.push_back(mate == me ? b.in(mine.offset) : b.mateIn(mate, mine.offset));
  }
  b.reduce({me == root ? b.out(mine.offset) : b.mateOut(root, mine.offset)}, inputs, mine.length,
           {.pre = true, .post = true});
  b.signal(kSummed, 1);
  b.waitMates(kSummed, 1);
}

void sumThroughSlots(plan::Builder& b, const Shape& shape, int root) {
  const plan::Topology& t = b.topology();
  const int me = t.myLocal(), team = t.teamSize();
  const int64_t chunkBytes =
      clipChunk(std::min(b.limits().chunkBytes, b.limits().halfBytes / kSlots), shape.bytes);
  const uint8_t pool = b.pool("chunks", kSlots, chunkBytes);
  b.eachChunk(shape.bytes, chunkBytes, [&](const plan::Chunk& c) {
    const int64_t reached = c.index + 1;
    const int64_t slotFree = reached - kSlots;
    const auto slot = [&](int mate, const plan::Range& r) {
      return b.slot(pool, mate, c.index, r.offset - c.offset);
    };
    const plan::Range mine = c.share(me, team);

    b.stage("copy in");
    b.waitMates(kSummed, slotFree);
    if (me != root) b.waitRank(root, kGathered, slotFree);
    for (int mate : otherMates(t)) {
      const plan::Range theirs = c.share(mate, team);
      b.copy({slot(me, theirs)}, b.in(theirs.offset), theirs.length);
    }
    b.signal(kCopied, reached);

    b.stage("sum");
    b.waitMates(kCopied, reached);
    b.waitRank(me, kCopied, reached);  // my "copy in" has waited until my slot is free
    std::vector<plan::Ref> contributions;
    for (int mate = 0; mate < team; ++mate) {
      contributions.push_back(mate == me ? b.in(mine.offset) : slot(mate, mine));
    }
    b.reduce({me == root ? b.out(mine.offset) : slot(me, mine)}, contributions, mine.length,
             {.pre = true, .post = true});
    b.signal(kSummed, reached);

    if (me != root) return;
    b.stage("copy out");
    b.waitMates(kSummed, reached);
    for (int mate : otherMates(t)) {
      const plan::Range theirs = c.share(mate, team);
      b.copy({b.out(theirs.offset)}, slot(mate, theirs), theirs.length);
    }
    b.signal(kGathered, reached);
  });
}

}  // namespace

plan::Plan reduceSharedMemory(const plan::Topology& t, const plan::Limits& limits,
                              const Shape& shape) {
  SMDDP_CHECK(t.numNodes() == 1, "shared-memory reduce is for one node");
  plan::Builder b(t, limits, "shared-memory reduce");
  b.arrive();
  if (shape.shared) {
    b.shareBuffers();
    sumInputs(b, shape, t.localOf(shape.root));
  } else {
    sumThroughSlots(b, shape, t.localOf(shape.root));
  }
  return b.done();
}

}  // namespace smddp::collectives
