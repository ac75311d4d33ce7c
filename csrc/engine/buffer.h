// Memory of a call that is addressed by offset.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/request.h"

namespace smddp::engine {

// Usually one run of bytes, else several. Owns nothing; the pieces outlive it.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::byte* flat) : flat_(flat) {}
  explicit Buffer(const Pieces& pieces) {
    if (pieces.size() == 1) {
      flat_ = pieces.front().data();
    } else {
      pieces_ = &pieces;
    }
  }
  struct Run {
    std::byte* data;
    int64_t bytes;
  };
  // The longest contiguous run from `offset`, at most `length` bytes.
  Run at(int64_t offset, int64_t length) const {
    if (pieces_ == nullptr) return {flat_ + offset, length};
    return find(offset, length);
  }

 private:
  Run find(int64_t offset, int64_t length) const;

  std::byte* flat_ = nullptr;
  const Pieces* pieces_ = nullptr;
};

}  // namespace smddp::engine
