// First-fit allocation of ranges of offsets. It does not touch the memory itself.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>

#include "common/error.h"

namespace smddp::transport::shm {

constexpr uint64_t roundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Not thread-safe. Adjacent free ranges are always joined.
class RegionAllocator {
 public:
  RegionAllocator(uint64_t begin, uint64_t end) : total_(end - begin), free_{{begin, end}} {}

  std::optional<uint64_t> allocate(uint64_t bytes, uint64_t align) {
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const auto [begin, end] = *it;
      const uint64_t offset = roundUp(begin, align);
      if (offset > end || end - offset < bytes) continue;
      free_.erase(it);
      if (offset > begin) free_[begin] = offset;
      if (offset + bytes < end) free_[offset + bytes] = end;
      used_ += bytes;
      return offset;
    }
    return std::nullopt;
  }

  void free(uint64_t offset, uint64_t bytes) {
    uint64_t end = offset + bytes;
    auto next = free_.lower_bound(offset);
    SMDDP_CHECK(next == free_.end() || next->first >= end, "offset {} is freed twice", offset);
    if (next != free_.end() && next->first == end) {
      end = next->second;
      next = free_.erase(next);
    }
    used_ -= bytes;
    if (next != free_.begin()) {
      const auto previous = std::prev(next);
      SMDDP_CHECK(previous->second <= offset, "offset {} is freed twice", offset);
      if (previous->second == offset) {
        previous->second = end;
        return;
      }
    }
    free_[offset] = end;
  }

  uint64_t used() const { return used_; }
  uint64_t total() const { return total_; }

 private:
  uint64_t total_;
  uint64_t used_ = 0;
  std::map<uint64_t, uint64_t> free_;  // begin -> end
};

}  // namespace smddp::transport::shm
