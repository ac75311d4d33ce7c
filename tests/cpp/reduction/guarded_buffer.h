// Memory in which a test sees what a kernel wrote, and where.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace smddp::reduction {

using Bytes = std::vector<std::byte>;

// Memory for one buffer, with a margin on both sides that must not change.
class GuardedBuffer {
 public:
  static constexpr size_t kMargin = 64;
  GuardedBuffer(size_t bytes, size_t offset)
      : offset_(kMargin + offset), bytes_(bytes), memory_(offset_ + bytes + kMargin, kFill) {}
  std::byte* data() { return memory_.data() + offset_; }
  Bytes content() const { return {memory_.begin() + offset_, memory_.begin() + offset_ + bytes_}; }
  bool holds(const Bytes& prefix) const {
    return std::equal(memory_.begin() + offset_, memory_.begin() + offset_ + bytes_,
                      prefix.begin());
  }
  bool marginsIntact() const {
    const auto isFill = [](std::byte b) { return b == kFill; };
    return std::all_of(memory_.begin(), memory_.begin() + offset_, isFill) &&
           std::all_of(memory_.begin() + offset_ + bytes_, memory_.end(), isFill);
  }

 private:
  static constexpr std::byte kFill{0xa5};
  size_t offset_, bytes_;
  Bytes memory_;
};

}  // namespace smddp::reduction
