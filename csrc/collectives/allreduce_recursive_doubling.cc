// Two-level allreduce by recursive doubling. It is for vectors so short that their bytes cost nothing beside a network
// step. Only the first rank of each node, the leader, talks to other nodes, in lg N steps.
//
//   1. copy in    Before it arrives, every rank except the leader copies its input to its slot.
//   2. exchange   When all have arrived, the leader sums the inputs, local ranks ascending. Then, in step d, it
//                 exchanges its sum with the leader 2^d nodes away, and both add the two, the lower node's first. So
//                 all get the same bits. Folded nodes (hypercube.h) send their sum to a corner before the exchange
//                 and get the result after it, in two more steps.
//   3. copy out   The other ranks copy the result from the leader's slot.
//
// 2 synchronisations, lg N steps (2 more if N is not a power of two); every leader sends lg N * M bytes, the
// other ranks none. If the vector is longer than a message, the exchange is repeated chunk by chunk.
#include "collectives/algorithms.h"
#include "collectives/cutting.h"
#include "collectives/hypercube.h"

namespace smddp::collectives {
namespace {

constexpr int kReduced = 1;
constexpr int kLeader = 0;

class RecursiveDoubling {
 public:
  RecursiveDoubling(plan::Builder& b, const Shape& shape) : b_(b), t_(b.topology()), cube_(t_) {
    // The whole vector lies in one slot. The rest of the staging memory is for the intermediate sums.
    const plan::Limits& limits = b.limits();
    const int64_t left = limits.halfBytes - granulesIn(shape.bytes) * kGranule;
    const int64_t numSums = cube_.dimensions() + 1;
    chunkBytes_ = clipChunk(std::min(limits.messageBytes, left / numSums), shape.bytes);
    vectors_ = b.pool("vectors", 1, shape.bytes);
    sums_ = b.pool("sums", numSums, chunkBytes_);
  }

  int64_t chunkBytes() const { return chunkBytes_; }
  bool isLeader() const { return t_.myLocal() == kLeader; }

  void copyIn(int64_t bytes) {
    if (!isLeader()) b_.copy({vector(t_.myLocal(), 0)}, b_.in(0), bytes);
  }

  void exchange(const plan::Chunk& c) {
    b_.stage("exchange");
    // sumNode writes sum(0), which goes to firstPartner() once per chunk. Chunk 3 flushes the puts of chunks 0 to 2.
    if (t_.numNodes() > 1) b_.flush(firstPartner(), 0, c.index);
    sumNode(c);
    if (cube_.isFolded()) {
      exchangeWithCorner(c);
    } else if (t_.numNodes() > 1) {
      addFolded(c);
      for (int d = 0; d < cube_.dimensions(); ++d) addPartners(d, c);
      sendToFolded(c);
    }
    if (t_.teamSize() > 1) b_.signal(kReduced, c.index + 1);
  }

  void copyOut(const plan::Chunk& c) {
    b_.stage("copy out");
    b_.waitRank(kLeader, kReduced, c.index + 1);
    b_.copy({b_.out(c.offset)}, vector(kLeader, c.offset), c.length);
  }

  // Flushes the last puts. A later plan uses the slots again and does not know of these puts.
  void finish() {
    if (t_.numNodes() == 1) return;
    b_.stage("exchange");
    if (cube_.foldPartner() >= 0) b_.flush(leaderOf(cube_.foldPartner()), 0);
    for (int d = 0; !cube_.isFolded() && d < cube_.dimensions(); ++d) {
      b_.flush(leaderOf(cube_.partner(d)), 0);
    }
  }

 private:
  // A rank's slot for the whole vector. The leader has no contribution in its slot, so it puts the result there.
  plan::Ref vector(int local, int64_t offset) const { return b_.slot(vectors_, local, 0, offset); }
  // My sum before step d.
  plan::Ref sum(int d) const { return b_.slot(sums_, kLeader, d, 0); }
  Rank leaderOf(int node) const { return t_.node(node)[kLeader]; }
  // The rank to which I send sum(0).
  Rank firstPartner() const {
    return leaderOf(cube_.isFolded() ? cube_.foldPartner() : cube_.partner(0));
  }
  // The targets of the result: my output and, if mates or a folded node need it, my slot.
  std::vector<plan::Ref> results(const plan::Chunk& c) const {
    std::vector<plan::Ref> refs{b_.out(c.offset)};
    const bool isSent = !cube_.isFolded() && cube_.foldPartner() >= 0;
    if (isSent || t_.teamSize() > 1) refs.push_back(vector(kLeader, c.offset));
    return refs;
  }

  void sumNode(const plan::Chunk& c) {
    std::vector<plan::Ref> contributions;
    for (int mate = 0; mate < t_.teamSize(); ++mate) {
      contributions.push_back(mate == kLeader ? b_.in(c.offset) : vector(mate, c.offset));
    }
    const bool isAll = t_.numNodes() == 1;
    b_.reduce(isAll ? results(c) : std::vector{sum(0)}, contributions, c.length,
              {.pre = true, .post = isAll});
  }

  void addPartners(int d, const plan::Chunk& c) {
    const Rank partner = leaderOf(cube_.partner(d));
    const bool isLast = d == cube_.dimensions() - 1;
    b_.put(partner, 0, sum(d), c.length);
    const plan::Ref theirs = b_.receive(partner, 0, c.length);
    std::vector<plan::Ref> operands{sum(d), theirs};
    if (!cube_.isLower(d)) std::swap(operands[0], operands[1]);
    if (!isLast) b_.flush(leaderOf(cube_.partner(d + 1)), 0, c.index);
    b_.reduce(isLast ? results(c) : std::vector{sum(d + 1)}, operands, c.length, {.post = isLast});
    b_.release(partner, 0);
  }

  void exchangeWithCorner(const plan::Chunk& c) {
    const Rank partner = leaderOf(cube_.foldPartner());
    b_.put(partner, 0, sum(0), c.length);
    const std::vector<plan::Ref> targets = results(c);
    b_.copy(targets, b_.receiveAt(targets.front(), partner, 0, c.length), c.length);
    b_.release(partner, 0);
  }

  void addFolded(const plan::Chunk& c) {
    if (cube_.foldPartner() < 0) return;
    const Rank partner = leaderOf(cube_.foldPartner());
    b_.reduce({sum(0)}, {sum(0), b_.receive(partner, 0, c.length)}, c.length);
    b_.release(partner, 0);
  }

  void sendToFolded(const plan::Chunk& c) {
    if (cube_.foldPartner() < 0) return;
    b_.put(leaderOf(cube_.foldPartner()), 0, vector(kLeader, c.offset), c.length);
  }

  plan::Builder& b_;
  const plan::Topology& t_;
  Hypercube cube_;
  int64_t chunkBytes_ = 0;
  uint8_t vectors_ = 0, sums_ = 0;
};

}  // namespace

plan::Plan allreduceRecursiveDoubling(const plan::Topology& t, const plan::Limits& limits,
                                      const Shape& shape) {
  plan::Builder b(t, limits, "recursive doubling allreduce");
  RecursiveDoubling doubling(b, shape);
  doubling.copyIn(shape.bytes);
  b.arrive();
  b.eachChunk(shape.bytes, doubling.chunkBytes(), [&](const plan::Chunk& c) {
    if (doubling.isLeader()) {
      doubling.exchange(c);
    } else {
      doubling.copyOut(c);
    }
  });
  if (doubling.isLeader()) doubling.finish();
  return b.done();
}

}  // namespace smddp::collectives
