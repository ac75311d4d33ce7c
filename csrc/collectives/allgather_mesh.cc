// Two-level all-gather, one hop between nodes: every rank's block goes straight to all other nodes,
// on the rail that carries it (carried_blocks.h).
//
// For each chunk of a block:
//
//   1. copy in   A rank copies its input to its place in its output and, if staged, to its slot for its mates.
//   2. send      The rank on each rail sends the chunks of its own block, and of those that it carries for mates,
//                to all other nodes.
//   3. receive   It receives theirs and copies them to their places in its output and, if staged, to its slots; with
//                shared buffers, to their places in all outputs of the node.
//   4. gather    Every rank copies its mates' chunks, and those that the other rails have received, from the
//                slots; with shared buffers it copies its mates' chunks from their inputs.
//   5. finish    With shared buffers a rank waits until nobody reads or writes its buffers any more.
//
// 1 network step; a rail sends (N-1) M bytes for each block that it carries. A rank puts its own block from its input.
#include "collectives/algorithms.h"
#include "collectives/carried_blocks.h"

namespace smddp::collectives {
namespace {

constexpr int kFilled = 1;    // chunk c of my block is in my slot
constexpr int kSlotSent = 2;  // the slots from which I send for mates may take chunk c
constexpr int kReady = 3;     // chunk c of the blocks that I carry has arrived
constexpr int kGathered = 4;  // I have chunk c of all blocks
constexpr int kSent = 5;      // all my puts have completed

class Mesh : public BlockExchange {
 public:
  Mesh(plan::Builder& b, const Shape& shape) : BlockExchange(b, shape) {
    cutFor(depth_ * (1 + blocks_.allTurns()));
    if (!staged_) return;
    own_ = b.pool("own chunks", depth_, chunkBytes_);
    arrived_ = b.pool("arrived chunks", depth_ * blocks_.allTurns(), chunkBytes_);
  }

  void copyIn(const plan::Chunk& c) {
    b_.stage("copy in");
    std::vector<plan::Ref> targets{b_.out(place(t_.me(), c))};
    if (staged_) {
      b_.waitMates(kGathered, c.index + 1 - depth_);
      if (!t_.onRail()) b_.waitRank(blocks_.carrierOf(me_), kSlotSent, c.index + 1);
      targets.push_back(ownSlot(me_, c));
    }
    b_.copy(targets, b_.in(c.offset), c.length);
    if (staged_) b_.signal(kFilled, c.index + 1);
  }

  void send(const plan::Chunk& c) {
    b_.stage("send");
    const int64_t perChunk = blocks_.count(me_, t_.myNode());
    if (perChunk > 1 && staged_) {
      // Each chunk makes perChunk puts to each node. With 2 of them and depth 4, chunk 6 flushes (6 + 1 - 4) * 2 = 6
      // puts, those of chunks 0 to 2 (cutting.h).
      const int64_t sent = (c.index + 1 - depth_) * perChunk;
      for (int n : others_) b_.flush(t_.railPeer(n), 0, sent);
      b_.signal(kSlotSent, c.index + 1);
    }
    for (int64_t turn = 0; turn < perChunk; ++turn) {
      const int mate = blocks_.local(me_, t_.myNode(), turn);
      plan::Ref source = b_.in(c.offset);
      if (mate != me_ && !staged_) source = b_.mateIn(mate, c.offset);
      if (mate != me_ && staged_) {
        b_.waitRank(mate, kFilled, c.index + 1);
        source = ownSlot(mate, c);
      }
      for (int n : others_) b_.put(t_.railPeer(n), 0, source, c.length);
    }
  }

  void receive(const plan::Chunk& c) {
    b_.stage("receive");
    if (staged_) b_.waitMates(kGathered, c.index + 1 - depth_);
    forEachArrival(me_, [&](int n, int local, int64_t slot) {
      const Rank from = t_.node(n)[local];
      std::vector<plan::Ref> targets{b_.out(place(from, c))};
      const plan::Ref chunk = b_.receiveAt(targets.front(), t_.railPeer(n), 0, c.length);
      if (staged_) {
        targets.push_back(arrivedSlot(me_, c, slot));
      } else {
        for (int mate : otherMates(t_)) targets.push_back(b_.mateOut(mate, place(from, c)));
      }
      b_.copy(targets, chunk, c.length);
      b_.release(t_.railPeer(n), 0);
    });
    b_.signal(kReady, c.index + 1);
  }

  void gather(const plan::Chunk& c) {
    b_.stage("gather");
    for (int mate : otherMates(t_)) {
      if (staged_) b_.waitRank(mate, kFilled, c.index + 1);
      b_.copy({b_.out(place(t_.team()[mate], c))},
              staged_ ? ownSlot(mate, c) : b_.mateIn(mate, c.offset), c.length);
    }
    for (int rail : otherMates(t_)) {
      if (rail >= t_.numRails() || !staged_) continue;
      b_.waitRank(rail, kReady, c.index + 1);
      forEachArrival(rail, [&](int n, int local, int64_t slot) {
        b_.copy({b_.out(place(t_.node(n)[local], c))}, arrivedSlot(rail, c, slot), c.length);
      });
    }
    b_.signal(kGathered, c.index + 1);
  }

  // Waits until nobody reads or writes my buffers any more.
  void finish(int64_t numChunks) {
    if (t_.onRail()) {
      b_.stage("send");
      for (int n : others_) b_.flush(t_.railPeer(n), 0);
      if (!staged_ && blocks_.count(me_, t_.myNode()) > 1) b_.signal(kSent, 1);
    }
    if (staged_) return;
    b_.stage("finish");
    b_.waitMates(kGathered, numChunks);
    waitRails(b_, kReady, numChunks);
    if (!t_.onRail()) b_.waitRank(blocks_.carrierOf(me_), kSent, 1);
  }

 private:
  plan::Ref ownSlot(int mate, const plan::Chunk& c) const {
    return b_.slot(own_, mate, c.index, 0);
  }
  plan::Ref arrivedSlot(int rail, const plan::Chunk& c, int64_t slot) const {
    return b_.slot(arrived_, rail, c.index * blocks_.allTurns() + slot, 0);
  }
  // Calls visit(node, local rank, number of the arrival) in the order in which the rail receives.
  template <typename Visit>
  void forEachArrival(int rail, Visit visit) const {
    int64_t slot = 0;
    for (int64_t turn = 0; turn < blocks_.mostTurns(); ++turn) {
      for (int n : others_) {
        const int local = blocks_.local(rail, n, turn);
        if (local >= 0) visit(n, local, slot++);
      }
    }
  }

  uint8_t own_ = 0, arrived_ = 0;
};

}  // namespace

plan::Plan allgatherMesh(const plan::Topology& t, const plan::Limits& limits, const Shape& shape) {
  plan::Builder b(t, limits, "mesh allgather");
  Mesh mesh(b, shape);
  b.arrive();
  int64_t numChunks = 0;
  b.eachChunk(shape.bytes, mesh.chunkBytes(), [&](const plan::Chunk& c) {
    numChunks = c.index + 1;
    mesh.copyIn(c);
    if (t.onRail()) {
      mesh.send(c);
      mesh.receive(c);
    }
    mesh.gather(c);
  });
  mesh.finish(numChunks);
  return b.done();
}

}  // namespace smddp::collectives
