#include "engine/memory/window_pool.h"

namespace smddp::engine::memory {

std::span<std::byte> WindowPool::take(size_t bytes) {
  if (const auto known = spare_.take(bytes); !known.empty()) return known;
  const auto window = slab_->allocate(bytes);
  try {
    slab_->commit(window);
  } catch (...) {
    slab_->free(window);
    throw;
  }
  return window;
}

void WindowPool::giveBack(std::span<std::byte> window) {
  if (!slab_->keeps(window)) return slab_->free(window);
  spare_.add(window);
}

}  // namespace smddp::engine::memory
