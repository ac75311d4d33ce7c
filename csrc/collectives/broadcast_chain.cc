// Broadcast along a chain of nodes, from the root's node to the next and so on. Every rail carries its share.
//
// For each chunk, cut into one share per rail:
//
//   1. copy in   On the root's node, the root copies the chunk to its slot,
//      copy out  and its mates copy it from there to their outputs. With shared buffers they copy from the root's
//                buffer.
//   2. send      On the root's node, the rank on each rail sends its share to the next node.
//   3. receive   On the other nodes, the rank on each rail receives its share, copies it to its output and to its
//                slot (with shared buffers: to all outputs of the node), and sends it on.
//   4. gather    On the other nodes, every rank copies the other shares from their slots.
//
// N-1 network steps, pipelined over the chunks; every rail sends M/L bytes. Puts read from the user's buffers. The
// plan does not overwrite the bytes there, so it flushes the puts at the end only.
#include "collectives/algorithms.h"
#include "collectives/cutting.h"

namespace smddp::collectives {
namespace {

constexpr int kFilled = 1;    // the root's slot has chunk c
constexpr int kReady = 2;     // my share of chunk c has arrived
constexpr int kGathered = 3;  // I have copied chunk c, or the others' shares of it, from slots

class Chain {
 public:
  Chain(plan::Builder& b, const Shape& shape)
      : b_(b),
        t_(b.topology()),
        staged_(isStaged(t_, shape.shared)),
        root_(t_.localOf(shape.root)),
        depth_(pipelineDepth(b.limits())) {
    const int rootNode = t_.nodeOf(shape.root);
    position_ = (t_.myNode() - rootNode + t_.numNodes()) % t_.numNodes();
    const int64_t rails = t_.numRails();
    chunkBytes_ = std::min({b.limits().fabricChunkBytes, b.limits().halfBytes / depth_,
                            rails * wholeGranules(b.limits().messageBytes)});
    chunkBytes_ = clipChunk(chunkBytes_, shape.bytes);
    if (shape.shared) b.shareBuffers();
    if (!staged_) return;
    const int64_t shareBytes = divideUp(granulesIn(chunkBytes_), rails) * kGranule;
    pool_ =
        onRootNode() ? b.pool("chunks", depth_, chunkBytes_) : b.pool("shares", depth_, shareBytes);
  }

  int64_t chunkBytes() const { return chunkBytes_; }
  bool onRootNode() const { return position_ == 0; }

  // Called on the root's node.
  void copyFromRoot(const plan::Chunk& c) {
    if (t_.myLocal() == root_) {
      if (staged_) {
        b_.stage("copy in");
        b_.waitMates(kGathered, c.index + 1 - depth_);
        b_.copy({b_.slot(pool_, root_, c.index, 0)}, b_.in(c.offset), c.length);
        b_.signal(kFilled, c.index + 1);
      }
      b_.stage("send");
    } else {
      b_.stage("copy out");
      if (staged_) b_.waitRank(root_, kFilled, c.index + 1);
      b_.copy({b_.out(c.offset)},
              staged_ ? b_.slot(pool_, root_, c.index, 0) : b_.mateIn(root_, c.offset), c.length);
      b_.signal(kGathered, c.index + 1);
    }
    const bool isRoot = t_.myLocal() == root_;
    const plan::Range mine = myShare(c);
    if (sends()) b_.put(next(), 0, isRoot ? b_.in(mine.offset) : b_.out(mine.offset), mine.length);
  }

  // Called on the other nodes.
  void receive(const plan::Chunk& c) {
    if (!t_.onRail()) return;
    const plan::Range mine = myShare(c);
    b_.stage("receive");
    std::vector<plan::Ref> targets{b_.out(mine.offset)};
    if (staged_) {
      b_.waitMates(kGathered, c.index + 1 - depth_);
      targets.push_back(b_.slot(pool_, t_.myLocal(), c.index, 0));
    } else {
      for (int mate : otherMates(t_)) targets.push_back(b_.mateOut(mate, mine.offset));
    }
    b_.copy(targets, b_.receiveAt(targets.front(), previous(), 0, mine.length), mine.length);
    b_.release(previous(), 0);
    b_.signal(kReady, c.index + 1);
    if (sends()) b_.put(next(), 0, b_.out(mine.offset), mine.length);
  }

  void gather(const plan::Chunk& c) {
    b_.stage("gather");
    waitRails(b_, kReady, c.index + 1);
    if (!staged_) return;
    for (int mate : otherMates(t_)) {
      if (mate >= t_.numRails()) continue;
      const plan::Range theirs = c.share(mate, t_.numRails());
      b_.copy({b_.out(theirs.offset)}, b_.slot(pool_, mate, c.index, 0), theirs.length);
    }
    b_.signal(kGathered, c.index + 1);
  }

  // Waits until nobody reads my buffer any more.
  void finish(int64_t numChunks) {
    if (onRootNode() && !staged_ && t_.myLocal() == root_) {
      b_.stage("finish");
      b_.waitMates(kGathered, numChunks);
    }
    if (!sends()) return;
    b_.stage(!onRootNode() ? "receive" : t_.myLocal() == root_ ? "send" : "copy out");
    b_.flush(next(), 0);
  }

 private:
  bool sends() const { return t_.onRail() && position_ + 1 < t_.numNodes(); }
  Rank next() const { return t_.railPeer((t_.myNode() + 1) % t_.numNodes()); }
  Rank previous() const { return t_.railPeer((t_.myNode() + t_.numNodes() - 1) % t_.numNodes()); }
  plan::Range myShare(const plan::Chunk& c) const { return c.share(t_.myLocal(), t_.numRails()); }

  plan::Builder& b_;
  const plan::Topology& t_;
  bool staged_;
  int root_;
  int64_t depth_;
  int position_ = 0;  // my node's place in the chain; the root's node has 0
  int64_t chunkBytes_ = 0;
  uint8_t pool_ = 0;
};

}  // namespace

plan::Plan broadcastChain(const plan::Topology& t, const plan::Limits& limits, const Shape& shape) {
  plan::Builder b(t, limits, "chain broadcast");
  Chain chain(b, shape);
  b.arrive();
  int64_t numChunks = 0;
  b.eachChunk(shape.bytes, chain.chunkBytes(), [&](const plan::Chunk& c) {
    numChunks = c.index + 1;
    if (chain.onRootNode()) {
      chain.copyFromRoot(c);
    } else {
      chain.receive(c);
      chain.gather(c);
    }
  });
  chain.finish(numChunks);
  return b.done();
}

}  // namespace smddp::collectives
