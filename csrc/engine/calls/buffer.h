// Memory of a call that is addressed by offset.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/calls/pieces.h"
#include "transport/transport.h"

namespace smddp::engine::calls {

// Usually one run of bytes, else several. Owns no memory of the call. The pieces outlive it, and stay where they are;
// moving the vector does not move them.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::byte* flat) : flat_(flat) {}
  explicit Buffer(const Pieces& pieces) {
    if (pieces.size() == 1) {
      flat_ = pieces.front().data();
      onDevice_ = pieces.front().onDevice;
    } else {
      usePieces(pieces);
    }
  }
  struct Run {
    std::byte* data;
    int64_t bytes;
  };
  // The longest contiguous run from `offset`, at most `length` bytes.
  Run at(int64_t offset, int64_t length) const {
    if (isFlat()) return {flat_ + offset, length};
    const Piece run = find(offset, length);
    return {run.data(), static_cast<int64_t>(run.size())};
  }
  // Returns such a run as a put takes it.
  transport::Payload payload(int64_t offset, int64_t length) const {
    if (isFlat()) return {transport::Bytes(flat_ + offset, static_cast<size_t>(length)), onDevice_};
    const Piece run = find(offset, length);
    return {run, run.onDevice};
  }

 private:
  bool isFlat() const { return ends_.empty(); }
  void usePieces(const Pieces& pieces);
  Piece find(int64_t offset, int64_t length) const;

  std::byte* flat_ = nullptr;
  bool onDevice_ = false;  // flat_ points to memory of a device
  std::span<const Piece> pieces_{};
  std::vector<int64_t> ends_{};  // the end of each piece, counted from the first byte of all
};

}  // namespace smddp::engine::calls
