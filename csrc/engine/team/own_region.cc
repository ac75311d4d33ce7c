#include "engine/team/own_region.h"

namespace smddp::engine::team {

OwnRegion::OwnRegion(process::Process& process, const memory::RegionLayout& layout)
    : ownership_(process.ownership()),
      pool_(process.memory().regions),
      layout_(layout),
      bytes_(pool_->take(layout)) {
  ownership_.assertOwned();
  entry_.regionOffset = process.memory().slab->offsetOf(bytes_.data());
  entry_.regionBytes = bytes_.size();
  entry_.groupId = process.newGroupId();
  header().group.store(entry_.groupId);
}

// A mate may still be in the last operation. Pages that are given back read as zeros at once, and the mate would get a
// wrong result; or it has still to read why this rank could not join. Then the region is not given back; it lives until
// the last mate has unmapped the slab.
OwnRegion::~OwnRegion() {
  if (!mayBeRead_) pool_->giveBack(bytes_, layout_);
}

void OwnRegion::publishBreak(const calls::Break& broken) {
  ownership_.assertOwned();
  expectReaders();
  memory::RegionHeader& mine = header();
  const uint32_t number = mine.numBreaks.load(std::memory_order_relaxed);
  if (number == memory::kMaxBreaks) return;
  memory::BreakRecord& record = mine.breaks[number];
  const std::string text = broken.cause.what();
  // The memory may have had a longer text of another group.
  record.text[text.copy(record.text, sizeof record.text - 1)] = 0;
  record.kind = static_cast<uint32_t>(broken.cause.kind());
  record.firstBroken = broken.firstBroken;
  record.lost = broken.lost;
  record.noticedBy = broken.noticedBy;
  record.isHostSilent = broken.isHostSilent ? 1 : 0;
  mine.numBreaks.store(number + 1, std::memory_order_release);
}

}  // namespace smddp::engine::team
