#include "collectives/direct_exchange.h"

namespace smddp::collectives {
namespace {

constexpr int kServed = NodeStages::kFirstFree;
constexpr int kShards = 0, kResults = 1;  // streams

// Shards of a long vector are not shorter: 64 KiB by default.
int64_t shardFloor(const plan::Limits& limits) { return wholeGranules(limits.messageBytes / 4); }

// The shortest shard with which more than one node serves. In an allreduce, 16 KiB by default: a single server sends
// and receives the vector once for each other node. A reduce with a single server takes one step instead of two.
int64_t serverFloor(const plan::Limits& limits, Collective collective) {
  return collective == Collective::AllReduce ? wholeGranules(limits.messageBytes / 16)
                                             : shardFloor(limits);
}

// The chunk length that suits the exchange. A shard is between 64 and 256 KiB: long messages take less work per byte. A
// long vector has at least kChunks chunks, so that receiving, summing and sending overlap.
// Example 2 nodes × 2 ranks: 4 shards, so a chunk is between 256 KiB and 1 MiB; the default of 1 MiB is kept, and 25
// MiB are 25 chunks. 8 nodes × 1 rank: 8 shards, so a chunk is at most 2 MiB; 4 MiB are 4 chunks of 1 MiB, 25 MiB are
// 13.
int64_t preferredChunk(const plan::Topology& t, const plan::Limits& limits, int64_t bytes) {
  constexpr int64_t kChunks = 8;
  const int64_t shards = int64_t{t.numRails()} * t.numNodes();
  return std::clamp(std::max(limits.fabricChunkBytes, bytes / kChunks), shards * shardFloor(limits),
                    shards * wholeGranules(limits.messageBytes));
}

}  // namespace

NodeStages DirectExchange::stagesFor(plan::Builder& b, const Shape& shape) {
  const plan::Topology& t = b.topology();
  NodeStages::Needs needs;
  // Each rank puts its contributions from its input, and its results from its output.
  needs.partials = !(t.isFlat() && shape.collective == Collective::AllReduce);
  // Encoded, the shards of a share take less than the share, and the result of one shard, too.
  if (shape.wire != Wire::fp32) needs.slots = 2 * pipelineDepth(b.limits());
  return NodeStages(b, shape, preferredChunk(t, b.limits(), shape.bytes), needs);
}

DirectExchange::DirectExchange(plan::Builder& b, NodeStages& node, const Shape& shape)
    : b_(b),
      t_(b.topology()),
      node_(node),
      wire_(shape.wire),
      feedback_(shape.feedback),
      others_(otherNodes(t_)) {
  if (shape.collective == Collective::Reduce) resultNode_ = t_.nodeOf(shape.root);
  const int64_t most = node.shareBytes() / serverFloor(b.limits(), shape.collective);
  numServers_ = static_cast<int>(std::clamp<int64_t>(most, 1, t_.numNodes()));
  firstServer_ = t_.myLocal() * numServers_ % t_.numNodes();
  if (numServers_ == 1 && resultNode_ >= 0) firstServer_ = resultNode_;
  iServe_ = t_.onRail() && serves(t_.myNode());
  for (int n : others_) {
    if (iServe_ && getsResults(n)) receivers_.push_back(t_.railPeer(n));
  }
  if (!encodes()) return;
  b_.setWire(wire_);
  const int64_t longest = divideUp(granulesIn(node.shareBytes()), numServers_) * kGranule;
  const int64_t encodedBytes = b_.encodedLength(longest);
  shards_ = b_.pool("encoded shards", node.depth() * numServers_, encodedBytes);
  results_ = b_.pool("encoded results", node.depth(), encodedBytes);
}

plan::Ref DirectExchange::encodedShard(const plan::Chunk& c, int n) const {
  return b_.encoded(b_.slot(shards_, t_.myLocal(), c.index * numServers_ + shardIndex(n), 0));
}

std::optional<plan::Ref> DirectExchange::residual(int64_t offset) const {
  if (!feedback_) return std::nullopt;
  return plan::Builder::residual(offset);
}

plan::Ref DirectExchange::receive(Rank peer, int stream, int64_t length) {
  return encodes() ? b_.receiveEncoded(peer, stream, length) : b_.receive(peer, stream, length);
}

plan::Ref DirectExchange::contribution(const plan::Chunk& c, int64_t offset) const {
  return t_.isFlat() ? b_.in(offset) : node_.partial(c, offset);
}

plan::Ref DirectExchange::result(const plan::Chunk& c, int64_t offset) const {
  if (encodesResults()) return b_.encoded(b_.slot(results_, t_.myLocal(), c.index, 0));
  return putsFromOutput() ? b_.out(offset) : node_.partial(c, offset);
}

void DirectExchange::freeResultSlot(const plan::Chunk& c) {
  if (putsFromOutput()) return;
  // Each chunk makes one put of results to each receiver. With depth 4, chunk 6 flushes 6 + 1 - 4 = 3 of them, those
  // of chunks 0 to 2: chunk 2 had this slot before (cutting.h).
  for (Rank peer : receivers_) b_.flush(peer, kResults, c.index + 1 - node_.depth());
}

void DirectExchange::sumAndScatter(const plan::Chunk& c) {
  if (encodes()) return encodeAndScatter(c);
  b_.stage("sum");
  if (!t_.isFlat()) {
    freeResultSlot(c);
    node_.sum(c);
  }
  for (int n : others_) {
    if (!serves(n)) continue;
    const plan::Range shard = shardOf(c, n);
    b_.put(t_.railPeer(n), kShards, contribution(c, shard.offset), shard.length);
  }
}

void DirectExchange::encodeAndScatter(const plan::Chunk& c) {
  b_.stage("sum");
  // The shards in these slots before must have left: each chunk makes one put of them to each server.
  for (int n : others_) {
    if (serves(n)) b_.flush(t_.railPeer(n), kShards, c.index + 1 - node_.depth());
  }
  if (!t_.isFlat()) node_.beginSum(c);
  for (int n = 0; n < t_.numNodes(); ++n) {
    if (!serves(n)) continue;
    const plan::Range shard = shardOf(c, n);
    const bool isMine = n == t_.myNode();
    if (!t_.isFlat()) {
      if (isMine) {
        node_.sumTo({node_.partial(c, shard.offset)}, c, shard);
      } else {
        node_.sumTo({encodedShard(c, n)}, c, shard, residual(shard.offset));
      }
    } else if (!isMine) {
      b_.copy({encodedShard(c, n)}, b_.in(shard.offset), shard.length, {}, residual(shard.offset));
    }
  }
  if (!t_.isFlat()) node_.endSum(c);
  for (int n : others_) {
    if (serves(n)) b_.put(t_.railPeer(n), kShards, encodedShard(c, n), shardOf(c, n).length);
  }
}

void DirectExchange::serve(const plan::Chunk& c) {
  if (!iServe_) return;
  const plan::Range shard = shardOf(c, t_.myNode());
  b_.stage("serve");
  if (t_.isFlat()) {
    freeResultSlot(c);
  } else {
    node_.awaitSum(c);
  }
  std::vector<plan::Ref> sums(static_cast<size_t>(t_.numNodes()), contribution(c, shard.offset));
  for (int n : others_) {
    sums[static_cast<size_t>(n)] = receive(t_.railPeer(n), kShards, shard.length);
  }
  std::vector<plan::Ref> results = node_.outputs(shard.offset);
  if (encodesResults() && node_.staged()) results.push_back(node_.partial(c, shard.offset));
  if (!putsFromOutput()) results.push_back(result(c, shard.offset));
  // In a flat group nobody has scaled the contributions.
  b_.reduce(results, sums, shard.length, {.pre = t_.isFlat(), .post = true},
            encodesResults() ? residual(shard.offset) : std::nullopt);
  for (int n : others_) b_.release(t_.railPeer(n), kShards);
  for (Rank peer : receivers_) b_.put(peer, kResults, result(c, shard.offset), shard.length);
  b_.signal(kServed, c.index + 1);
}

void DirectExchange::collect(const plan::Chunk& c) {
  b_.stage("collect");
  for (int n : others_) {
    if (!serves(n)) continue;
    const Rank peer = t_.railPeer(n);
    if (!getsResults(t_.myNode())) {
      b_.flush(peer, kShards, c.index + 1);
      continue;
    }
    const plan::Range shard = shardOf(c, n);
    std::vector<plan::Ref> targets = node_.outputs(shard.offset);
    if (node_.staged()) targets.push_back(node_.partial(c, shard.offset));
    const plan::Ref result = encodes()
                                 ? b_.receiveEncoded(peer, kResults, shard.length)
                                 : b_.receiveAt(targets.front(), peer, kResults, shard.length);
    // The result overwrites the shard that I sent. If it was encoded, it left from another place.
    if (!encodes()) b_.flush(peer, kShards, c.index + 1);
    b_.copy(targets, result, shard.length);
    b_.release(peer, kResults);
  }
  if (iServe_) b_.waitRank(t_.myLocal(), kServed, c.index + 1);
  node_.ready(c);
}

void DirectExchange::finish() {
  b_.stage("collect");
  for (Rank peer : receivers_) b_.flush(peer, kResults);
  for (int n : others_) {
    if (encodes() && serves(n)) b_.flush(t_.railPeer(n), kShards);
  }
}

}  // namespace smddp::collectives
