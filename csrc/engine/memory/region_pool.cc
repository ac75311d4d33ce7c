#include "engine/memory/region_pool.h"

namespace smddp::engine::memory {

std::span<std::byte> RegionPool::take(const RegionLayout& layout) {
  std::span<std::byte> region = spare_.take(layout.bytes());
  if (region.empty()) region = slab_->allocate(layout.bytes());
  try {
    slab_->commit(region.first(layout.halfOffset(0, 0)));
  } catch (...) {
    spare_.add(region);
    throw;
  }
  auto& header = *reinterpret_cast<RegionHeader*>(region.data());
  header.numBreaks.store(0, std::memory_order_relaxed);
  header.left.store(0, std::memory_order_relaxed);
  header.trouble.store(0, std::memory_order_relaxed);
  header.called.store(0, std::memory_order_relaxed);
  header.blame.store(0, std::memory_order_relaxed);
  for (int64_t t = 0; t < layout.tracks; ++t)
    new (region.data() + layout.trackOffset(t)) TrackHeader;
  return region;
}

void RegionPool::giveBack(std::span<std::byte> region, const RegionLayout& layout) {
  // Release: a mate that reads this 0 knows that we have done everything that we do with its region.
  reinterpret_cast<RegionHeader*>(region.data())->group.store(0, std::memory_order_release);
  slab_->discard(region.subspan(layout.halfOffset(0, 0)));
  spare_.add(region);
}

}  // namespace smddp::engine::memory
