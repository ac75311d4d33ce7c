// Blocks of memory that nobody uses at the moment, by their exact size. Thread-safe; owns none of them.
//
// The block that was used last is handed out first. Pages that a network card knows stay with their block (Slab::keep).
// If blocks took turns, each of them would in time keep as many pages as the largest use needs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <span>
#include <vector>

#include "common/mutex.h"

namespace smddp::engine::memory {

class SpareMemory {
 public:
  // Empty: there is none of this size.
  std::span<std::byte> take(size_t bytes) {
    const MutexLock lock(mutex_);
    const auto found = std::find_if(blocks_.rbegin(), blocks_.rend(),
                                    [&](const auto& block) { return block.size() == bytes; });
    if (found == blocks_.rend()) return {};
    const auto block = *found;
    blocks_.erase(std::prev(found.base()));
    return block;
  }
  void add(std::span<std::byte> block) {
    const MutexLock lock(mutex_);
    blocks_.push_back(block);
  }

 private:
  Mutex mutex_;
  std::vector<std::span<std::byte>> blocks_ SMDDP_GUARDED_BY(mutex_);
};

}  // namespace smddp::engine::memory
