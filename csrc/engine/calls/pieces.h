// The memory of a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace smddp::engine::calls {

// A run of bytes. With onDevice it lies in memory that was passed to Transport::addDeviceSource(), and only puts may
// read it. So the block that this rank sends to itself must already be at its destination.
struct Piece : std::span<std::byte> {
  using std::span<std::byte>::span;
  Piece(std::span<std::byte> bytes, bool isOnDevice = false)
      : std::span<std::byte>(bytes), onDevice(isOnDevice) {}
  // `length` bytes of it, from `offset` on.
  Piece part(size_t offset, size_t length) const { return {subspan(offset, length), onDevice}; }
  bool onDevice = false;
};

// Memory that behaves as one run of bytes: one piece usually, several for lists of tensors.
using Pieces = std::vector<Piece>;

inline int64_t totalBytes(const Pieces& pieces) {
  int64_t total = 0;
  for (const auto& piece : pieces) total += static_cast<int64_t>(piece.size());
  return total;
}

}  // namespace smddp::engine::calls
