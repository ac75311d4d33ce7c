// Two-level reduce-scatter, one hop between nodes: the mirror image of the mesh all-gather. Each
// rank's block is carried by a rail (carried_blocks.h).
//
// For each chunk of a block:
//
//   1. copy in   If staged, a rank copies the chunk of all blocks that other rails carry to its slot. It reads the
//                blocks that it carries itself from its input.
//   2. sum       The rank on each rail sums its node's contributions, local ranks ascending, for
//                every block that it carries, and sends the sum to the block's node. If every node has one rank, it
//                sends its contributions from its input.
//   3. serve     There the rank on the same rail adds up the sums of all nodes in the order of nodes. The result
//                goes to its output or, for a mate without a rail, to a slot; with shared buffers, to the mate's
//                output.
//   4. copy out  If staged, the mate copies the result from that slot.
//   5. finish    With shared buffers a rank waits until nobody reads its input or writes its output any more.
//
// 1 network step; a rail sends (N-1) M bytes for each block that it carries.
//
// If the shape has a wire format, sums for other nodes are encoded. The sum of the block's own node is not, nor is the
// result. With error feedback each rank keeps what its encodings lose.
#include <optional>

#include "collectives/algorithms.h"
#include "collectives/carried_blocks.h"

namespace smddp::collectives {
namespace {

constexpr int kCopied = 1;    // my contributions to chunk c are in my slot
constexpr int kSummed = 2;    // I have summed chunk c of all blocks that I carry
constexpr int kOwnSum = 3;    // the number of sums that I have made for my own node
constexpr int kServed = 4;    // chunk c of the blocks that I carry to my node is complete
constexpr int kGathered = 5;  // I have copied chunk c of my block
constexpr int64_t kContributionSlots = 2;

class DirectSum : public BlockExchange {
 public:
  DirectSum(plan::Builder& b, const Shape& shape)
      : BlockExchange(b, shape), wire_(shape.wire), feedback_(shape.feedback) {
    const int64_t numRanks = t_.numRanks();
    cutFor(kContributionSlots * numRanks + depth_ * (blocks_.allTurns() + blocks_.mostTurns()));
    b.setWire(shape.wire);
    if (putsFromInput()) return;
    sums_ = b.pool("sums", depth_ * blocks_.allTurns(), chunkBytes_);
    if (!staged_) return;
    contributions_ = b.pool("contributions", kContributionSlots, numRanks * chunkBytes_);
    results_ = b.pool("results", depth_ * blocks_.mostTurns(), chunkBytes_);
  }

  void copyIn(const plan::Chunk& c) {
    if (!staged_) return;
    b_.stage("copy in");
    waitRails(b_, kSummed, c.index + 1 - kContributionSlots);
    for (Rank r = 0; r < t_.numRanks(); ++r) {
      if (blocks_.carrierOf(t_.localOf(r)) == me_) continue;
      b_.copy({b_.slot(contributions_, me_, c.index, r * chunkBytes_)}, b_.in(place(r, c)),
              c.length);
    }
    b_.signal(kCopied, c.index + 1);
  }

  void sum(const plan::Chunk& c) {
    b_.stage("sum");
    if (putsFromInput()) {
      for (int n : others_) {
        const Rank peer = t_.railPeer(n);
        b_.put(peer, 0, b_.in(place(peer, c)), c.length);
      }
      return;
    }
    for (int n : others_) {
      b_.flush(t_.railPeer(n), 0, (c.index + 1 - depth_) * blocks_.count(me_, n));
    }
    b_.waitRank(me_, kServed, c.index + 1 - depth_);
    if (staged_) b_.waitMates(kCopied, c.index + 1);
    const int64_t mine = blocks_.count(me_, t_.myNode());
    for (int64_t turn = 0, slot = 0; turn < blocks_.mostTurns(); ++turn) {
      // My own node's sum comes first. A put may have to wait for another rank's "serve", and mine waits for this sum.
      if (turn < mine && !t_.isFlat()) {
        sumOf(t_.myNode(), turn, c, sumSlot(c, turn));
        b_.signal(kOwnSum, c.index * mine + turn + 1);
      }
      for (int n : others_) {
        if (turn >= blocks_.count(me_, n)) continue;
        plan::Ref target = sumSlot(c, mine + slot++);
        if (encodes()) target = b_.encoded(target);
        sumOf(n, turn, c, target);
        b_.put(t_.railPeer(n), 0, target, c.length);
      }
    }
    b_.signal(kSummed, c.index + 1);
  }

  void serve(const plan::Chunk& c) {
    b_.stage("serve");
    const int64_t mine = blocks_.count(me_, t_.myNode());
    for (int64_t turn = 0; turn < mine; ++turn) {
      const int mate = blocks_.local(me_, t_.myNode(), turn);
      if (!t_.isFlat()) b_.waitRank(me_, kOwnSum, c.index * mine + turn + 1);
      const plan::Ref own = t_.isFlat() ? b_.in(place(t_.me(), c)) : sumSlot(c, turn);
      std::vector<plan::Ref> sums(static_cast<size_t>(t_.numNodes()), own);
      for (int n : others_) {
        const Rank peer = t_.railPeer(n);
        sums[static_cast<size_t>(n)] =
            encodes() ? b_.receiveEncoded(peer, 0, c.length) : b_.receive(peer, 0, c.length);
      }
      plan::Ref target = b_.out(c.offset);
      if (mate != me_ && !staged_) target = b_.mateOut(mate, c.offset);
      if (mate != me_ && staged_) {
        b_.waitRank(mate, kGathered, c.index + 1 - depth_);
        target = resultSlot(me_, c, turn);
      }
      // In a flat group nobody has scaled the contributions.
      b_.reduce({target}, sums, c.length, {.pre = t_.isFlat(), .post = true});
      for (int n : others_) b_.release(t_.railPeer(n), 0);
    }
    b_.signal(kServed, c.index + 1);
  }

  // Called on ranks without a rail.
  void copyOut(const plan::Chunk& c) {
    if (!staged_) return;
    const int carrier = blocks_.carrierOf(me_);
    b_.stage("copy out");
    b_.waitRank(carrier, kServed, c.index + 1);
    b_.copy({b_.out(c.offset)}, resultSlot(carrier, c, me_ / t_.numRails()), c.length);
    b_.signal(kGathered, c.index + 1);
  }

  void finish(int64_t numChunks) {
    if (t_.onRail()) {
      b_.stage("sum");
      for (int n : others_) b_.flush(t_.railPeer(n), 0);
    }
    if (staged_) return;
    b_.stage("finish");
    waitRails(b_, kSummed, numChunks);
    if (!t_.onRail()) b_.waitRank(blocks_.carrierOf(me_), kServed, numChunks);
  }

 private:
  bool encodes() const { return wire_ != Wire::fp32; }
  bool putsFromInput() const { return t_.isFlat() && !encodes(); }
  plan::Ref sumSlot(const plan::Chunk& c, int64_t i) const {
    return b_.slot(sums_, me_, c.index * blocks_.allTurns() + i, 0);
  }
  plan::Ref resultSlot(int rail, const plan::Chunk& c, int64_t turn) const {
    return b_.slot(results_, rail, c.index * blocks_.mostTurns() + turn, 0);
  }

  // My node's sum of the block that I carry to node n in this turn.
  void sumOf(int n, int64_t turn, const plan::Chunk& c, plan::Ref target) {
    const Rank r = t_.node(n)[static_cast<size_t>(blocks_.local(me_, n, turn))];
    std::optional<plan::Ref> residual;
    if (target.isEncoded && feedback_) residual = b_.residual(place(r, c));
    // In a flat group "serve" scales the contributions.
    if (t_.isFlat()) return b_.copy({target}, b_.in(place(r, c)), c.length, {}, residual);
    std::vector<plan::Ref> contributions;
    for (int mate = 0; mate < t_.teamSize(); ++mate) {
      if (mate == me_) {
        contributions.push_back(b_.in(place(r, c)));
      } else if (staged_) {
        contributions.push_back(b_.slot(contributions_, mate, c.index, r * chunkBytes_));
      } else {
        contributions.push_back(b_.mateIn(mate, place(r, c)));
      }
    }
    b_.reduce({target}, contributions, c.length, {.pre = true}, residual);
  }

  const Wire wire_;
  const bool feedback_;
  uint8_t sums_ = 0, contributions_ = 0, results_ = 0;
};

}  // namespace

plan::Plan reduceScatterDirect(const plan::Topology& t, const plan::Limits& limits,
                               const Shape& shape) {
  plan::Builder b(t, limits, "direct reduce_scatter");
  DirectSum exchange(b, shape);
  b.arrive();
  int64_t numChunks = 0;
  b.eachChunk(shape.bytes, exchange.chunkBytes(), [&](const plan::Chunk& c) {
    numChunks = c.index + 1;
    exchange.copyIn(c);
    if (t.onRail()) {
      exchange.sum(c);
      exchange.serve(c);
    } else {
      exchange.copyOut(c);
    }
  });
  exchange.finish(numChunks);
  return b.done();
}

}  // namespace smddp::collectives
