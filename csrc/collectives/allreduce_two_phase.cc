// Two-phase allreduce through staging slots: a reduce-scatter and an all-gather. For each chunk,
// cut into one share per rank:
//
//   1. copy in   A rank copies the others' shares of its input to its slot. It reads its own share from the input.
//   2. sum       It sums its share over the team, local ranks ascending, into its output and into its slot. The
//                place of its own share in the slot is still free.
//   3. copy out  It copies the others' sums from their slots to its output.
//
// There are three slots, so that three chunks can be in the three stages at once. 3 synchronisations a chunk; a rank
// copies 2 M (L-1)/L bytes and reads M to sum.
#include "collectives/algorithms.h"
#include "collectives/cutting.h"

namespace smddp::collectives {
namespace {

constexpr int kCopied = 1;
constexpr int kSummed = 2;
constexpr int kGathered = 3;
constexpr int64_t kSlots = 3;

}  // namespace

plan::Plan allreduceTwoPhase(const plan::Topology& t, const plan::Limits& limits,
                             const Shape& shape) {
  SMDDP_CHECK(t.numNodes() == 1, "two-phase allreduce is for one node");
  const int me = t.myLocal();
  const int team = t.teamSize();
  const int64_t chunkBytes =
      clipChunk(std::min(limits.chunkBytes, limits.halfBytes / kSlots), shape.bytes);
  plan::Builder b(t, limits, "two-phase allreduce");
  const uint8_t pool = b.pool("chunks", kSlots, chunkBytes);
  b.arrive();

  b.eachChunk(shape.bytes, chunkBytes, [&](const plan::Chunk& c) {
    const int64_t reached = c.index + 1;
    const int64_t slotFree = reached - kSlots;
    const auto slot = [&](int mate, const plan::Range& r) {
      return b.slot(pool, mate, c.index, r.offset - c.offset);
    };
    const plan::Range mine = c.share(me, team);

    b.stage("copy in");
    // Wait for both: stages are lanes of their own, so a mate may have gathered and still be summing.
    b.waitMates(kSummed, slotFree);
    b.waitMates(kGathered, slotFree);
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
    b.reduce({b.out(mine.offset), slot(me, mine)}, contributions, mine.length,
             {.pre = true, .post = true});
    b.signal(kSummed, reached);

    b.stage("copy out");
    b.waitMates(kSummed, reached);
    for (int mate : otherMates(t)) {
      const plan::Range theirs = c.share(mate, team);
      b.copy({b.out(theirs.offset)}, slot(mate, theirs), theirs.length);
    }
    b.signal(kGathered, reached);
  });
  return b.done();
}

}  // namespace smddp::collectives
