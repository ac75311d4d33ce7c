#include "collectives/node_stages.h"

namespace smddp::collectives {
namespace {

// Two slots: one contribution is summed while the next one is copied.
constexpr int64_t kContributionSlots = 2;

}  // namespace

NodeStages::NodeStages(plan::Builder& b, const Shape& shape, int64_t chunkBytes, Needs needs)
    : b_(b),
      t_(b.topology()),
      staged_(isStaged(t_, shape.shared)),
      everybodyReads_(shape.collective != Collective::Reduce),
      depth_(pipelineDepth(b.limits())) {
  if (!everybodyReads_ && t_.nodeOf(shape.root) == t_.myNode())
    soleReader_ = t_.localOf(shape.root);
  // All nodes must cut alike, also those that do not stage. So this counts the staging memory as if every node staged.
  // A half holds 2 contributions (a whole chunk = `rails` shares each), `depth` partial slots (one share each), and the
  // slots of the exchange. 8 MiB, 2 rails, depth 4: 8 MiB / (2·2 + 4) = 1 MiB per share.
  const int64_t rails = t_.numRails();
  const int64_t slots =
      (t_.isFlat() ? 0 : kContributionSlots * rails) + (needs.partials ? depth_ : 0) + needs.slots;
  if (slots > 0) {
    chunkBytes = std::min(chunkBytes, wholeGranules(b.limits().halfBytes / slots) * rails);
  }
  chunkBytes_ = clipChunk(chunkBytes, shape.bytes);
  shareBytes_ = divideUp(granulesIn(chunkBytes_), rails) * kGranule;
  if (needs.partials) partials_ = b.pool("partials", depth_, shareBytes_);
  if (staged_) contributions_ = b.pool("contributions", kContributionSlots, chunkBytes_);
  if (shape.shared) b.shareBuffers();
}

void NodeStages::copyIn(const plan::Chunk& c) {
  if (!staged_) return;
  const int me = t_.myLocal();
  b_.stage("copy in");
  waitRails(b_, kSummed, c.index + 1 - kContributionSlots);
  for (int rail = 0; rail < t_.numRails(); ++rail) {
    if (rail == me) continue;  // sum() reads my own share from the input
    const plan::Range theirs = c.share(rail, t_.numRails());
    b_.copy({b_.slot(contributions_, me, c.index, theirs.offset - c.offset)}, b_.in(theirs.offset),
            theirs.length);
  }
  b_.signal(kCopied, c.index + 1);
}

void NodeStages::sum(const plan::Chunk& c) {
  const plan::Range mine = c.share(t_.myLocal(), t_.numRails());
  beginSum(c);
  sumTo({partial(c, mine.offset)}, c, mine);
  endSum(c);
}

void NodeStages::beginSum(const plan::Chunk& c) {
  const int me = t_.myLocal();
  b_.stage("sum");
  // The previous share in this slot must be complete, and gathered if mates copy it.
  const int64_t slotFree = c.index + 1 - depth_;
  if (staged_ && everybodyReads_) {
    b_.waitMates(kGathered, slotFree);
  } else if (staged_ && soleReader_ >= 0 && soleReader_ != me) {
    b_.waitRank(soleReader_, kGathered, slotFree);
  } else {
    b_.waitRank(me, kReady, slotFree);
  }
  if (staged_) b_.waitMates(kCopied, c.index + 1);
}

void NodeStages::sumTo(std::vector<plan::Ref> destinations, const plan::Chunk& c,
                       const plan::Range& part, std::optional<plan::Ref> residual) {
  const int me = t_.myLocal();
  std::vector<plan::Ref> contributions;
  for (int mate = 0; mate < t_.teamSize(); ++mate) {
    if (mate == me) {
      contributions.push_back(b_.in(part.offset));
    } else if (staged_) {
      contributions.push_back(b_.slot(contributions_, mate, c.index, part.offset - c.offset));
    } else {
      contributions.push_back(b_.mateIn(mate, part.offset));
    }
  }
  b_.reduce(std::move(destinations), std::move(contributions), part.length, {.pre = true},
            residual);
}

void NodeStages::endSum(const plan::Chunk& c) { b_.signal(kSummed, c.index + 1); }

void NodeStages::awaitSum(const plan::Chunk& c) { b_.waitRank(t_.myLocal(), kSummed, c.index + 1); }

void NodeStages::ready(const plan::Chunk& c) { b_.signal(kReady, c.index + 1); }

void NodeStages::gather(const plan::Chunk& c) {
  if (staged_ && !isReader(t_.myLocal())) return;
  b_.stage("gather");
  waitRails(b_, kReady, c.index + 1);
  if (!staged_) return;
  for (int mate : otherMates(t_)) {
    if (mate >= t_.numRails()) continue;
    const plan::Range theirs = c.share(mate, t_.numRails());
    b_.copy({b_.out(theirs.offset)}, partialOf(mate, c, theirs.offset), theirs.length);
  }
  b_.signal(kGathered, c.index + 1);
}

plan::Range NodeStages::shard(const plan::Chunk& c, int i, int parts) const {
  // Also cut a shorter last chunk where a full chunk would be cut.
  const int me = t_.myLocal(), rails = t_.numRails();
  const plan::Range full = plan::share({c.offset, c.fullLength}, me, rails, c.fullLength);
  return plan::share(full, i, parts, c.share(me, rails).length);
}

plan::Ref NodeStages::partial(const plan::Chunk& c, int64_t offset) const {
  return partialOf(t_.myLocal(), c, offset);
}

plan::Ref NodeStages::partialOf(int rail, const plan::Chunk& c, int64_t offset) const {
  const plan::Range full = plan::share({c.offset, c.fullLength}, rail, t_.numRails(), c.fullLength);
  // An empty share of a shorter last chunk begins where the chunk ends; nothing is read or written there.
  return b_.slot(partials_, rail, c.index, std::max<int64_t>(offset - full.offset, 0));
}

std::vector<plan::Ref> NodeStages::outputs(int64_t offset) {
  std::vector<plan::Ref> refs;
  if (isReader(t_.myLocal())) refs.push_back(b_.out(offset));
  for (int mate : otherMates(t_)) {
    if (!staged_ && isReader(mate)) refs.push_back(b_.mateOut(mate, offset));
  }
  return refs;
}

}  // namespace smddp::collectives
