// Two-level allreduce with the direct exchange: a parameter server that is spread over all ranks.
//
// For each chunk, cut into one share per rail, and each share into one shard per *server*:
//
//   1. sum       inside the node I get the node's sum of my rail's share (node_stages.h)
//      scatter   and send each server its shard.
//   2. serve     If my node is a server: I wait for the other nodes' shards, sum them in the order
//                of nodes, and send the result back to all of them.
//   3. collect   I wait for the results of the other servers,
//   4. gather    and inside the node everybody gets every share.
//
// Two network steps however many nodes there are; every rank sends 2 M/L (N-1)/N bytes, as in a
// ring. All nodes serve, unless shards would become so short that the cost of a message is not its
// bytes: then fewer do, and each rail begins with another node, so that the load stays level.
#include "collectives/algorithms.h"
#include "collectives/node_stages.h"

namespace smddp::collectives {
namespace {

constexpr int kServed = NodeStages::kFirstFree;
constexpr int kShards = 0, kResults = 1;  // streams

// Shards are not made shorter than this as long as one server is left: 64 KiB by default.
int64_t shardFloor(const plan::Limits& limits) { return wholeGranules(limits.messageBytes / 4); }

int64_t preferredChunk(const plan::Topology& t, const plan::Limits& limits) {
  const int64_t shards = int64_t{t.numRails()} * t.numNodes();
  return std::clamp(limits.fabricChunkBytes, shards * shardFloor(limits),
                    shards * wholeGranules(limits.messageBytes));
}

// Which nodes serve my rail's share, and what.
struct Servers {
  int first = 0, count = 0, numNodes = 0;

  Servers(const plan::Topology& t, int64_t shareBytes, int64_t floor) : numNodes(t.numNodes()) {
    count = static_cast<int>(std::clamp<int64_t>(shareBytes / floor, 1, numNodes));
    first = t.myLocal() * count % numNodes;
  }
  // Which shard node n serves, or none when it is >= count.
  int shardOf(int n) const { return (n - first + numNodes) % numNodes; }
  bool serves(int n) const { return shardOf(n) < count; }
};

// The steps of one rank on a rail.
class DirectExchange {
 public:
  DirectExchange(plan::Builder& b, NodeStages& node)
      : b_(b),
        t_(b.topology()),
        node_(node),
        servers_(t_, node.shareBytes(), shardFloor(b.limits())),
        others_(otherNodes(t_)) {}

  void sumAndScatter(const plan::Chunk& c) {
    b_.stage("sum");
    if (iServe()) {
      for (int n : others_) b_.flush(t_.railPeer(n), kResults, c.index + 1 - node_.depth());
    }
    node_.sum(c);
    for (int n : others_) {
      if (!servers_.serves(n)) continue;
      const plan::Range shard = shardOf(c, n);
      b_.put(t_.railPeer(n), kShards, node_.partial(c, shard.offset), shard.length);
    }
  }

  void serve(const plan::Chunk& c) {
    if (!iServe()) return;
    const plan::Range shard = shardOf(c, t_.myNode());
    const plan::Ref mine = node_.partial(c, shard.offset);
    b_.stage("serve");
    node_.awaitSum(c);
    std::vector<plan::Ref> sums(static_cast<size_t>(t_.numNodes()), mine);
    for (int n : others_) {
      sums[static_cast<size_t>(n)] = b_.receive(t_.railPeer(n), kShards, shard.length);
    }
    std::vector<plan::Ref> results = node_.outputs(shard.offset);
    results.push_back(mine);
    b_.reduce(results, sums, shard.length, {.post = true});
    for (int n : others_) b_.release(t_.railPeer(n), kShards);
    for (int n : others_) b_.put(t_.railPeer(n), kResults, mine, shard.length);
    b_.signal(kServed, c.index + 1);
  }

  void collect(const plan::Chunk& c) {
    b_.stage("collect");
    for (int n : others_) {
      if (!servers_.serves(n)) continue;
      const Rank peer = t_.railPeer(n);
      const plan::Range shard = shardOf(c, n);
      const plan::Ref result = b_.receive(peer, kResults, shard.length);
      b_.flush(peer, kShards, c.index + 1);  // the result takes the place of what I sent
      std::vector<plan::Ref> targets = node_.outputs(shard.offset);
      if (node_.staged()) targets.push_back(node_.partial(c, shard.offset));
      b_.copy(targets, result, shard.length);
      b_.release(peer, kResults);
    }
    if (iServe()) b_.waitMate(t_.myLocal(), kServed, c.index + 1);
    node_.ready(c);
  }

  // The slots may be used again by a later plan, which knows nothing of these puts.
  void finish() {
    if (!iServe()) return;
    b_.stage("collect");
    for (int n : others_) b_.flush(t_.railPeer(n), kResults);
  }

 private:
  bool iServe() const { return servers_.serves(t_.myNode()); }
  plan::Range shardOf(const plan::Chunk& c, int n) const {
    return node_.shard(c, servers_.shardOf(n), servers_.count);
  }

  plan::Builder& b_;
  const plan::Topology& t_;
  NodeStages& node_;
  Servers servers_;
  std::vector<int> others_;
};

}  // namespace

plan::Plan allreduceDirect(const plan::Topology& t, const plan::Limits& limits,
                           const Shape& shape) {
  plan::Builder b(t, limits, "direct allreduce");
  NodeStages node(b, shape, preferredChunk(t, limits));
  DirectExchange exchange(b, node);
  b.arrive();
  b.eachChunk(shape.bytes, node.chunkBytes(), [&](const plan::Chunk& c) {
    node.copyIn(c);
    if (t.onRail()) {
      exchange.sumAndScatter(c);
      exchange.serve(c);
      exchange.collect(c);
    }
    node.gather(c);
  });
  if (t.onRail()) exchange.finish();
  return b.done();
}

}  // namespace smddp::collectives
