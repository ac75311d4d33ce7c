// Blocks of memory that nobody uses at the moment, by their exact size. Thread-safe; owns none of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "common/mutex.h"

namespace smddp::engine {

class SpareMemory {
 public:
  // Empty: there is none of this size.
  std::span<std::byte> take(size_t bytes) {
    const MutexLock lock(mutex_);
    const auto found = std::find_if(blocks_.begin(), blocks_.end(),
                                    [&](const auto& block) { return block.size() == bytes; });
    if (found == blocks_.end()) return {};
    const auto block = *found;
    blocks_.erase(found);
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

}  // namespace smddp::engine
