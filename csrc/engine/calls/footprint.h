// The memory of a call, to find out whether two calls may run at the same time.
#pragma once

#include <algorithm>
#include <functional>

#include "engine/calls/pieces.h"

namespace smddp::engine::calls {

// A list of tensors counts as one range, from its first byte to its last. So two calls may seem to conflict that do
// not; then one waits for the other in vain. Owns nothing, and reads no memory.
class Footprint {
 public:
  Footprint() = default;
  Footprint(const Pieces& input, const Pieces& output) : read_(input), written_(output) {}

  // True if one of the two writes memory that the other reads or writes.
  bool conflictsWith(const Footprint& other) const {
    return written_.overlaps(other.written_) || written_.overlaps(other.read_) ||
           read_.overlaps(other.written_);
  }

 private:
  struct Range {
    Range() = default;
    explicit Range(const Pieces& pieces) {
      for (const Piece& piece : pieces) {
        if (piece.empty()) continue;
        begin = begin == nullptr ? piece.data() : std::min(begin, piece.data(), std::less<>());
        end = std::max(end, piece.data() + piece.size(), std::less<>());
      }
    }
    bool overlaps(const Range& other) const {
      const std::less<> less;
      return less(begin, other.end) && less(other.begin, end);
    }
    std::byte* begin = nullptr;
    std::byte* end = nullptr;
  };

  Range read_, written_;
};

}  // namespace smddp::engine::calls
