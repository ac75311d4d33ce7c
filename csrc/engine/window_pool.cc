#include "engine/window_pool.h"

#include <algorithm>

namespace smddp::engine {

std::span<std::byte> WindowPool::take(size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    const auto fits = [&](const auto& spare) { return spare.size() == bytes; };
    if (const auto found = std::find_if(spare_.begin(), spare_.end(), fits);
        found != spare_.end()) {
      const auto window = *found;
      spare_.erase(found);
      return window;
    }
  }
  const auto window = slab_->allocate(bytes);
  slab_->commit(window);
  return window;
}

void WindowPool::giveBack(std::span<std::byte> window) {
  if (!slab_->keeps(window)) return slab_->free(window);
  const std::lock_guard lock(mutex_);
  spare_.push_back(window);
}

}  // namespace smddp::engine
