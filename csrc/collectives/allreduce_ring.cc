// Two-level allreduce with rings between nodes: one ring per rail, traffic between neighbours only.
//
// For each chunk, cut into one share per rail and each share into one shard per node, on node n of
// N:
//
//   1. sum          The rank on each rail gets its node's sum of its share (node_stages.h).
//   2. ring reduce  N-1 times: it sends a partial shard to the next node, receives one from the previous, and adds
//                   its own to that. It begins by sending shard n-1. In the end shard n is complete here.
//   3. ring gather  N-1 times: it sends the newest complete shard to the next node and receives another one.
//   4. gather       Inside the node every rank gets every share.
//
// Example, 3 nodes, as seen from node 0:
//
//   ring reduce  step 0: send shard 2, receive and add shard 1     step 1: send 1, receive and add 0 (complete)
//   ring gather  step 0: send shard 0, receive shard 2             step 1: send 2, receive 1
//
// 2 (N-1) network steps; every rank sends 2 M/L (N-1)/N bytes. A shard is summed in the order of the ring, from the
// node after its owner on: in the example shard 0 is (node 1 + node 2) + node 0. The order differs between shards,
// but is the same on all ranks and in every run. The two rings are lanes of their own, so that one chunk is reduced
// while the one before it is gathered.
#include "collectives/algorithms.h"
#include "collectives/node_stages.h"

namespace smddp::collectives {
namespace {

constexpr int kReduced = NodeStages::kFirstFree;
constexpr int kPartials = 0, kResults = 1;  // streams

int64_t preferredChunk(const plan::Topology& t, const plan::Limits& limits) {
  const int64_t shards = int64_t{t.numRails()} * t.numNodes();
  return std::min(limits.fabricChunkBytes, shards * wholeGranules(limits.messageBytes));
}

// The steps of one rank on a rail.
class RingExchange {
 public:
  RingExchange(plan::Builder& b, NodeStages& node)
      : b_(b),
        t_(b.topology()),
        node_(node),
        numNodes_(t_.numNodes()),
        next_(t_.railPeer((t_.myNode() + 1) % numNodes_)),
        previous_(t_.railPeer((t_.myNode() + numNodes_ - 1) % numNodes_)) {}

  void sum(const plan::Chunk& c) {
    b_.stage("sum");
    // Each chunk makes numSteps() puts of results. On 3 nodes with depth 4, chunk 6 flushes (6 + 1 - 4) * 2 = 6 of
    // them, those of chunks 0 to 2: chunk 2 had this slot before (cutting.h).
    if (numSteps() > 0) b_.flush(next_, kResults, (c.index + 1 - node_.depth()) * numSteps());
    node_.sum(c);
  }

  void reduce(const plan::Chunk& c) {
    b_.stage("ring reduce");
    node_.awaitSum(c);
    for (int step = 0; step < numSteps(); ++step) {
      const plan::Range sent = shard(c, -1 - step);
      const plan::Range added = shard(c, -2 - step);
      const plan::Ref mine = node_.partial(c, added.offset);
      b_.put(next_, kPartials, node_.partial(c, sent.offset), sent.length);
      const plan::Ref theirs = b_.receive(previous_, kPartials, added.length);
      const bool last = step == numSteps() - 1;
      std::vector<plan::Ref> targets;
      if (last) targets = node_.outputs(added.offset);
      targets.push_back(mine);
      b_.reduce(targets, {theirs, mine}, added.length, {.post = last});
      b_.release(previous_, kPartials);
    }
    if (numSteps() == 0) finishAlone(c);
    b_.signal(kReduced, c.index + 1);
  }

  void gather(const plan::Chunk& c) {
    b_.stage("ring gather");
    b_.waitRank(t_.myLocal(), kReduced, c.index + 1);
    for (int step = 0; step < numSteps(); ++step) {
      const plan::Range sent = shard(c, -step);
      const plan::Range taken = shard(c, -1 - step);
      b_.put(next_, kResults, node_.partial(c, sent.offset), sent.length);
      std::vector<plan::Ref> targets = node_.outputs(taken.offset);
      targets.push_back(node_.partial(c, taken.offset));
      const plan::Ref result = b_.receiveAt(targets.front(), previous_, kResults, taken.length);
      // The result overwrites the shard that I sent in the same step of the ring reduce. On 3 nodes, step 1 of
      // chunk 6 flushes 6 * 2 + 1 + 1 = 14 puts: 12 of chunks 0 to 5, and steps 0 and 1 of this one.
      b_.flush(next_, kPartials, c.index * numSteps() + step + 1);
      b_.copy(targets, result, taken.length);
      b_.release(previous_, kResults);
    }
    node_.ready(c);
  }

  // Flushes the last puts. A later plan uses the slots again and does not know of these puts.
  void finish() {
    if (numSteps() == 0) return;
    b_.stage("ring gather");
    b_.flush(next_, kResults);
  }

 private:
  int numSteps() const { return numNodes_ - 1; }
  // The shard of the node that is `distance` further on in the ring. 2 N is added because `distance` may be -N.
  plan::Range shard(const plan::Chunk& c, int distance) const {
    return node_.shard(c, (t_.myNode() + distance + 2 * numNodes_) % numNodes_, numNodes_);
  }
  // With one node, the node's sum is the result.
  void finishAlone(const plan::Chunk& c) {
    const plan::Range mine = shard(c, 0);
    std::vector<plan::Ref> targets = node_.outputs(mine.offset);
    targets.push_back(node_.partial(c, mine.offset));
    b_.copy(targets, node_.partial(c, mine.offset), mine.length, {.post = true});
  }

  plan::Builder& b_;
  const plan::Topology& t_;
  NodeStages& node_;
  int numNodes_;
  Rank next_, previous_;
};

}  // namespace

plan::Plan allreduceRing(const plan::Topology& t, const plan::Limits& limits, const Shape& shape) {
  plan::Builder b(t, limits, "ring allreduce");
  NodeStages node(b, shape, preferredChunk(t, limits));
  b.arrive();
  b.eachChunk(shape.bytes, node.chunkBytes(), [&](const plan::Chunk& c) {
    node.copyIn(c);
    if (t.onRail()) {
      RingExchange exchange(b, node);
      exchange.sum(c);
      exchange.reduce(c);
      exchange.gather(c);
    }
    node.gather(c);
  });
  if (t.onRail()) RingExchange(b, node).finish();
  return b.done();
}

}  // namespace smddp::collectives
