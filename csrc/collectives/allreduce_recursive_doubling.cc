// Two-level allreduce by recursive doubling, for vectors whose bytes cost nothing beside a network step: only
// the first rank of each node talks to other nodes, and in lg N steps.
//
//   1. copy in    before arriving, everybody but the leader (the first rank of its node) copies its input to
//                 its slot.
//   2. exchange   Once all have arrived, the leader sums them, local ranks ascending. Then, in step d, it
//                 exchanges what it has with the leader 2^d nodes away, and both add the two, the lower
//                 node's first: all have the same bits. Nodes beyond the last power of two hand their sum to
//                 a partner before and get the result after (hypercube.h), in two more steps.
//   3. copy out   The mates copy the result from the leader's slot.
//
// 2 synchronisations, lg N steps (2 more where N is no power of two); every leader sends lg N * M bytes, the
// other ranks none. Where a message is shorter than the vector, the exchange is repeated chunk by chunk.
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
    // The vector as a whole lies in one slot; what is left is for the sums on the way.
    const plan::Limits& limits = b.limits();
    const int64_t left = limits.poolBytes - granulesIn(shape.bytes) * kGranule;
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
    // Of the last chunk, the slot's last put.
    if (t_.numNodes() > 1) b_.flush(firstPartner(), 0, c.index);
    sumNode(c);
    if (cube_.isFolded()) {
      handOver(c);
    } else if (t_.numNodes() > 1) {
      takeOver(c);
      for (int d = 0; d < cube_.dimensions(); ++d) addPartners(d, c);
      giveBack(c);
    }
    if (t_.teamSize() > 1) b_.signal(kReduced, c.index + 1);
  }

  void copyOut(const plan::Chunk& c) {
    b_.stage("copy out");
    b_.waitMate(kLeader, kReduced, c.index + 1);
    b_.copy({b_.out(c.offset)}, vector(kLeader, c.offset), c.length);
  }

  // The slots may be used again by a later plan, which knows nothing of these puts.
  void finish() {
    if (t_.numNodes() == 1) return;
    b_.stage("exchange");
    if (cube_.foldPartner() >= 0) b_.flush(leaderOf(cube_.foldPartner()), 0);
    for (int d = 0; !cube_.isFolded() && d < cube_.dimensions(); ++d) {
      b_.flush(leaderOf(cube_.partner(d)), 0);
    }
  }

 private:
  // The leader's slot takes the result: it has no contribution there.
  plan::Ref vector(int local, int64_t offset) const { return b_.slot(vectors_, local, 0, offset); }
  // What I have before step d.
  plan::Ref sum(int d) const { return b_.slot(sums_, kLeader, d, 0); }
  Rank leaderOf(int node) const { return t_.node(node)[kLeader]; }
  // To whom I send the first sum.
  Rank firstPartner() const {
    return leaderOf(cube_.isFolded() ? cube_.foldPartner() : cube_.partner(0));
  }
  // Where others find the result, besides my output.
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

  void handOver(const plan::Chunk& c) {
    const Rank partner = leaderOf(cube_.foldPartner());
    b_.put(partner, 0, sum(0), c.length);
    b_.copy(results(c), b_.receive(partner, 0, c.length), c.length);
    b_.release(partner, 0);
  }

  void takeOver(const plan::Chunk& c) {
    if (cube_.foldPartner() < 0) return;
    const Rank partner = leaderOf(cube_.foldPartner());
    b_.reduce({sum(0)}, {sum(0), b_.receive(partner, 0, c.length)}, c.length);
    b_.release(partner, 0);
  }

  void giveBack(const plan::Chunk& c) {
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
