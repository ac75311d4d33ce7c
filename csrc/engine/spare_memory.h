// Blocks of memory that nobody uses at the moment, by their exact size. Thread-safe; owns none of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <span>
#include <vector>

namespace smddp::engine {

class SpareMemory {
 public:
  // Empty: there is none of this size.
  std::span<std::byte> take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(blocks_.begin(), blocks_.end(),
                                    [&](const auto& block) { return block.size() == bytes; });
    if (found == blocks_.end()) return {};
    const auto block = *found;
    blocks_.erase(found);
    return block;
  }
  void add(std::span<std::byte> block) {
    const std::lock_guard lock(mutex_);
    blocks_.push_back(block);
  }

 private:
  std::mutex mutex_;
  std::vector<std::span<std::byte>> blocks_;  // guarded by mutex_
};

}  // namespace smddp::engine
