// Two-level allreduce by recursive halving and doubling between nodes. It is for so many nodes that a message to
// each would cost more than some more steps.
//
// For each chunk, cut into one share per rail, and each share into one shard per corner of a cube of nodes
// (hypercube.h), on corner n of C = 2^q:
//
//   1. sum       The rank on each rail gets its node's sum of its share (node_stages.h).
//   2. halving   In step d = q-1 … 0 a rank halves the shards that it still sums. It keeps the half with shard n,
//                sends the other half to the node 2^d away, and adds what that node sends, the lower node's operand
//                first. In the end shard n is complete here.
//   3. doubling  In step d = 0 … q-1 it sends all its complete shards to the same node and receives as many.
//   4. gather    Inside the node every rank gets every share.
//
// Example, 8 nodes (q = 3), as seen from node 5:
//
//   halving   d = 2: keep shards 4-7, send 0-3 to node 1    d = 1: keep 4-5, send 6-7 to node 7
//             d = 0: keep 5, send 4 to node 4
//   doubling  d = 0: send 5 to node 4, receive 4            d = 1: send 4-5 to node 7, receive 6-7
//             d = 2: send 4-7 to node 1, receive 0-3
//
// Folded nodes send their whole share to their corner before halving, and get the result after doubling.
//
// 2 lg N network steps, 2 more if N is not a power of two; every rank sends 2 M/L (C-1)/C bytes, and corners with a
// folded node M/L more. All shards are summed in the same order. Halving and doubling are lanes of their own, so
// that one chunk is halved while the one before it is doubled.
#include "collectives/algorithms.h"
#include "collectives/hypercube.h"
#include "collectives/node_stages.h"

namespace smddp::collectives {
namespace {

constexpr int kHalved = NodeStages::kFirstFree;
constexpr int kPartials = 0, kResults = 1;  // streams

// A whole share is the longest message.
int64_t preferredChunk(const plan::Topology& t, const plan::Limits& limits) {
  return std::min(std::max(limits.fabricChunkBytes, limits.messageBytes * t.numRails()),
                  wholeGranules(limits.messageBytes) * t.numRails());
}

// The steps of one rank on a rail.
class CubeExchange {
 public:
  CubeExchange(plan::Builder& b, NodeStages& node)
      : b_(b), t_(b.topology()), node_(node), cube_(t_) {
    if (cube_.foldPartner() >= 0) fold_ = t_.railPeer(cube_.foldPartner());
    for (int d = 0; !cube_.isFolded() && d < cube_.dimensions(); ++d) {
      partners_.push_back(t_.railPeer(cube_.partner(d)));
    }
  }

  void sum(const plan::Chunk& c) {
    b_.stage("sum");
    // The number of chunks up to the one that had this slot before; each makes one put of results to each partner.
    const int64_t last = c.index + 1 - node_.depth();
    for (Rank partner : partners_) b_.flush(partner, kResults, last);
    if (fold_ >= 0 && !cube_.isFolded()) b_.flush(fold_, kResults, last);
    node_.sum(c);
  }

  void halve(const plan::Chunk& c) {
    b_.stage("halving");
    node_.awaitSum(c);
    const plan::Range all = shards(c, 0, cube_.numCorners());
    if (cube_.isFolded()) {
      b_.put(fold_, kPartials, node_.partial(c, all.offset), all.length);
      return;
    }
    if (fold_ >= 0) add(c, all, fold_, true, false);
    for (int d = cube_.dimensions() - 1; d >= 0; --d) {
      const plan::Range sent = half(c, d, !cube_.isLower(d) ? 0 : 1);
      b_.put(partners_[d], kPartials, node_.partial(c, sent.offset), sent.length);
      add(c, half(c, d, cube_.isLower(d) ? 0 : 1), partners_[d], cube_.isLower(d), d == 0);
    }
    if (partners_.empty()) finishAlone(c, all);
    b_.signal(kHalved, c.index + 1);
  }

  void doubleUp(const plan::Chunk& c) {
    b_.stage("doubling");
    const plan::Range all = shards(c, 0, cube_.numCorners());
    if (cube_.isFolded()) {
      take(c, all, fold_);
    } else {
      b_.waitRank(t_.myLocal(), kHalved, c.index + 1);
      for (int d = 0; d < cube_.dimensions(); ++d) {
        const plan::Range sent = half(c, d, cube_.isLower(d) ? 0 : 1);
        b_.put(partners_[d], kResults, node_.partial(c, sent.offset), sent.length);
        take(c, half(c, d, !cube_.isLower(d) ? 0 : 1), partners_[d]);
      }
      if (fold_ >= 0) b_.put(fold_, kResults, node_.partial(c, all.offset), all.length);
    }
    node_.ready(c);
  }

  // Flushes the last puts. A later plan uses the slots again and does not know of these puts.
  void finish() {
    b_.stage("doubling");
    for (Rank partner : partners_) b_.flush(partner, kResults);
    if (fold_ >= 0 && !cube_.isFolded()) b_.flush(fold_, kResults);
  }

 private:
  // Shards [first, first + count) of my share.
  plan::Range shards(const plan::Chunk& c, int first, int count) const {
    const plan::Range from = node_.shard(c, first, cube_.numCorners());
    const plan::Range last = node_.shard(c, first + count - 1, cube_.numCorners());
    return {from.offset, last.offset + last.length - from.offset};
  }
  // Before halving in dimension d a rank has 2^(d+1) shards. Returns their lower or upper half. For node 5 and d = 1
  // these are shards 4 to 7, from 5 >> 2 << 2 = 4 on; the halves are 4-5 and 6-7.
  plan::Range half(const plan::Chunk& c, int d, int upper) const {
    const int count = 1 << d;
    return shards(c, (t_.myNode() >> (d + 1) << (d + 1)) + upper * count, count);
  }

  void add(const plan::Chunk& c, const plan::Range& range, Rank partner, bool isLower,
           bool isLast) {
    const plan::Ref mine = node_.partial(c, range.offset);
    std::vector<plan::Ref> operands{mine, b_.receive(partner, kPartials, range.length)};
    if (!isLower) std::swap(operands[0], operands[1]);
    std::vector<plan::Ref> targets;
    if (isLast) targets = node_.outputs(range.offset);
    targets.push_back(mine);
    b_.reduce(targets, operands, range.length, {.post = isLast});
    b_.release(partner, kPartials);
  }

  // Receives results. They overwrite what I sent to the same partner before.
  void take(const plan::Chunk& c, const plan::Range& range, Rank partner) {
    std::vector<plan::Ref> targets = node_.outputs(range.offset);
    targets.push_back(node_.partial(c, range.offset));
    const plan::Ref result = b_.receiveAt(targets.front(), partner, kResults, range.length);
    b_.flush(partner, kPartials, c.index + 1);
    b_.copy(targets, result, range.length);
    b_.release(partner, kResults);
  }

  // With one node, the node's sum is the result.
  void finishAlone(const plan::Chunk& c, const plan::Range& all) {
    std::vector<plan::Ref> targets = node_.outputs(all.offset);
    targets.push_back(node_.partial(c, all.offset));
    b_.copy(targets, node_.partial(c, all.offset), all.length, {.post = true});
  }

  plan::Builder& b_;
  const plan::Topology& t_;
  NodeStages& node_;
  Hypercube cube_;
  Rank fold_ = -1;              // my corner, or the rank folded onto me, or -1
  std::vector<Rank> partners_;  // by dimension
};

}  // namespace

plan::Plan allreduceHalvingDoubling(const plan::Topology& t, const plan::Limits& limits,
                                    const Shape& shape) {
  plan::Builder b(t, limits, "halving-doubling allreduce");
  NodeStages node(b, shape, preferredChunk(t, limits));
  b.arrive();
  b.eachChunk(shape.bytes, node.chunkBytes(), [&](const plan::Chunk& c) {
    node.copyIn(c);
    if (t.onRail()) {
      CubeExchange exchange(b, node);
      exchange.sum(c);
      exchange.halve(c);
      exchange.doubleUp(c);
    }
    node.gather(c);
  });
  if (t.onRail()) CubeExchange(b, node).finish();
  return b.done();
}

}  // namespace smddp::collectives
