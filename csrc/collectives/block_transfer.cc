#include "collectives/block_transfer.h"

namespace smddp::collectives {
namespace {

constexpr int kCopied = 1;     // chunk c of my blocks is in my slot
constexpr int kSent = 2;       // my puts of chunk c have completed
constexpr int kMoved = 3;      // I have taken, or given, chunk c inside my node
constexpr int kArrived = 4;    // chunk c of the blocks that I receive for mates has arrived
constexpr int kCollected = 5;  // I have copied chunk c of the blocks that others received for me
constexpr int64_t kContributionSlots = 2;

}  // namespace

BlockTransfer::BlockTransfer(plan::Builder& b, const Shape& shape)
    : BlockExchange(b, shape),
      isGather_(shape.collective == Collective::Gather),
      sender_(shape.collective == Collective::Scatter ? shape.root : -1),
      receiver_(isGather_ ? shape.root : -1),
      // With one receiver, the senders can copy their blocks in parallel.
      gives_(isGather_ && !staged_) {
  findMyBlocks();
  const int64_t blocksIn = isGather_ ? 1 : t_.numRanks();
  // The largest number of blocks that any rail receives for mates.
  const int64_t beyondRails = blocks_.mostTurns() - 1;
  if (t_.numNodes() == 1)
    mostArrivals_ = 0;
  else if (isGather_)
    mostArrivals_ = blocks_.allTurns();
  else
    mostArrivals_ = sender_ < 0 ? beyondRails * t_.numRanks() : beyondRails;
  cutFor(kContributionSlots * blocksIn + depth_ * mostArrivals_);
  if (!staged_) return;
  contributions_ = b.pool("contributions", kContributionSlots, blocksIn * chunkBytes_);
  if (mostArrivals_ > 0) arrived_ = b.pool("arrived chunks", depth_ * mostArrivals_, chunkBytes_);
}

// Calls visit(node, sender's local rank, receiver's local rank) for all pairs of this rail. All ranks go through the
// same rounds, and each round covers all nodes. So no message waits for the credit of a later one.
template <typename Visit>
void BlockTransfer::forEachPair(int rail, Visit visit) const {
  size_t most = 0;
  for (const auto& node : t_.nodes()) most = std::max(most, node.size());
  const auto locals = static_cast<int>(most);
  for (int from = 0; from < locals; ++from) {
    for (int to = 0; to < locals; ++to) {
      if (carrierOf(from, to) != rail) continue;
      for (int n : others_) visit(n, from, to);
    }
  }
}

// Calls visit(node, sender, receiver's local rank, slot) for all blocks that the rail receives. The slot is -1 if the
// block is for the receiving rank itself.
template <typename Visit>
void BlockTransfer::forEachArrival(int rail, Visit visit) const {
  int64_t slot = 0;
  forEachPair(rail, [&](int n, int from, int to) {
    if (from >= static_cast<int>(t_.node(n).size()) || to >= t_.teamSize()) return;
    const Rank sender = t_.node(n)[from];
    if (!sends(sender) || !receives(t_.team()[to])) return;
    visit(n, sender, to, to == rail ? -1 : slot++);
  });
}

void BlockTransfer::findMyBlocks() {
  for (Rank r = 0; r < t_.numRanks(); ++r) {
    const bool isRemote = t_.nodeOf(r) != t_.myNode();
    if (r != t_.me() && sends(t_.me()) && receives(r)) {
      const int carrier = carrierOf(me_, t_.localOf(r));
      if (!isRemote || carrier != me_) staging_.push_back(r);
      if (isRemote && carrier != me_) myCarriers_.insert(carrier);
    }
    if (isRemote && sends(r) && receives(t_.me())) {
      const int carrier = carrierOf(t_.localOf(r), me_);
      if (carrier != me_) deliverers_.insert(carrier);
    }
  }
  if (!t_.onRail()) return;
  forEachPair(me_, [&](int n, int from, int to) {
    const auto theirs = static_cast<int>(t_.node(n).size());
    const bool isOut =
        from < t_.teamSize() && to < theirs && sends(t_.team()[from]) && receives(t_.node(n)[to]);
    if (isOut) sendsTo_.insert(n);
    if (isOut && from != me_) carriesFrom_.insert(from);
  });
  forEachArrival(me_, [&](int, Rank, int to, int64_t) {
    if (to != me_) carriesTo_.insert(to);
  });
}

int64_t BlockTransfer::inputPlace(Rank to, const plan::Chunk& c) const {
  return isGather_ ? c.offset : place(to, c);
}

int64_t BlockTransfer::outputPlace(Rank from, const plan::Chunk& c) const {
  return sender_ < 0 ? place(from, c) : c.offset;
}

// A mate's block, or mine, at the place from which this rank may read it.
plan::Ref BlockTransfer::block(int fromMate, Rank to, const plan::Chunk& c) const {
  if (fromMate == me_) return b_.in(inputPlace(to, c));
  if (!staged_) return b_.mateIn(fromMate, inputPlace(to, c));
  return b_.slot(contributions_, fromMate, c.index, isGather_ ? 0 : to * chunkBytes_);
}

plan::Ref BlockTransfer::arrivedSlot(int rail, const plan::Chunk& c, int64_t i) const {
  return b_.slot(arrived_, rail, c.index * mostArrivals_ + i, 0);
}

void BlockTransfer::copyIn(const plan::Chunk& c) {
  if (!staged_ || staging_.empty()) return;
  const int64_t slotFree = c.index + 1 - kContributionSlots;
  b_.stage("copy in");
  for (int mate : otherMates(t_)) {
    if (receives(t_.team()[mate])) b_.waitRank(mate, kMoved, slotFree);
  }
  for (int carrier : myCarriers_) b_.waitRank(carrier, kSent, slotFree);
  for (Rank to : staging_) {
    b_.copy({b_.slot(contributions_, me_, c.index, isGather_ ? 0 : to * chunkBytes_)},
            b_.in(inputPlace(to, c)), c.length);
  }
  b_.signal(kCopied, c.index + 1);
}

void BlockTransfer::send(const plan::Chunk& c) {
  b_.stage("send");
  if (staged_) {
    for (int mate : carriesFrom_) b_.waitRank(mate, kCopied, c.index + 1);
  }
  forEachPair(me_, [&](int n, int from, int to) {
    if (from >= t_.teamSize() || to >= static_cast<int>(t_.node(n).size())) return;
    const Rank receiver = t_.node(n)[to];
    if (!sends(t_.team()[from]) || !receives(receiver)) return;
    b_.put(t_.railPeer(n), 0, block(from, receiver, c), c.length);
  });
  if (carriesFrom_.empty()) return;
  b_.stage("sent");
  for (int n : sendsTo_) b_.flush(t_.railPeer(n), 0);
  b_.signal(kSent, c.index + 1);
}

void BlockTransfer::receive(const plan::Chunk& c) {
  b_.stage("receive");
  if (staged_) {
    for (int mate : carriesTo_) b_.waitRank(mate, kCollected, c.index + 1 - depth_);
  }
  forEachArrival(me_, [&](int n, Rank sender, int to, int64_t slot) {
    plan::Ref target = b_.out(outputPlace(sender, c));
    if (to != me_) {
      target = staged_ ? arrivedSlot(me_, c, slot) : b_.mateOut(to, outputPlace(sender, c));
    }
    b_.copy({target}, b_.receiveAt(target, t_.railPeer(n), 0, c.length), c.length);
    b_.release(t_.railPeer(n), 0);
  });
  if (!carriesTo_.empty()) b_.signal(kArrived, c.index + 1);
}

void BlockTransfer::take(const plan::Chunk& c) {
  if (!receives(t_.me())) return;
  b_.stage("take");
  if (sends(t_.me())) {
    b_.copy({b_.out(outputPlace(t_.me(), c))}, b_.in(inputPlace(t_.me(), c)), c.length);
  }
  if (gives_) return;
  bool isAwaited = false;
  for (int mate : otherMates(t_)) {
    const Rank from = t_.team()[mate];
    if (!sends(from)) continue;
    isAwaited = true;
    if (staged_) b_.waitRank(mate, kCopied, c.index + 1);
    b_.copy({b_.out(outputPlace(from, c))}, block(mate, t_.me(), c), c.length);
  }
  if (isAwaited) b_.signal(kMoved, c.index + 1);
}

void BlockTransfer::give(const plan::Chunk& c) {
  const bool isMate = t_.nodeOf(receiver_) == t_.myNode() && receiver_ != t_.me();
  if (!isMate) return;
  b_.stage("give");
  b_.copy({b_.mateOut(t_.localOf(receiver_), outputPlace(t_.me(), c))}, b_.in(c.offset), c.length);
  b_.signal(kMoved, c.index + 1);
}

void BlockTransfer::copyOut(const plan::Chunk& c) {
  if (!staged_ || deliverers_.empty()) return;
  b_.stage("copy out");
  for (int rail : deliverers_) {
    b_.waitRank(rail, kArrived, c.index + 1);
    forEachArrival(rail, [&](int, Rank sender, int to, int64_t slot) {
      if (to != me_) return;
      b_.copy({b_.out(outputPlace(sender, c))}, arrivedSlot(rail, c, slot), c.length);
    });
  }
  b_.signal(kCollected, c.index + 1);
}

// Waits until nobody reads or writes my buffers any more.
void BlockTransfer::finish(int64_t numChunks) {
  b_.stage("send");
  for (int n : sendsTo_) b_.flush(t_.railPeer(n), 0);
  if (staged_) return;
  b_.stage("finish");
  for (int mate : otherMates(t_)) {
    const Rank other = t_.team()[mate];
    const bool usesMine =
        gives_ ? sends(other) && receives(t_.me()) : sends(t_.me()) && receives(other);
    if (usesMine) b_.waitRank(mate, kMoved, numChunks);
  }
  for (int carrier : myCarriers_) b_.waitRank(carrier, kSent, numChunks);
  for (int rail : deliverers_) b_.waitRank(rail, kArrived, numChunks);
}

plan::Plan BlockTransfer::build() {
  b_.arrive();
  int64_t numChunks = 0;
  b_.eachChunk(blockBytes_, chunkBytes_, [&](const plan::Chunk& c) {
    numChunks = c.index + 1;
    copyIn(c);
    if (t_.onRail()) {
      send(c);
      receive(c);
    }
    take(c);
    if (gives_) give(c);
    copyOut(c);
  });
  finish(numChunks);
  return b_.done();
}

}  // namespace smddp::collectives
