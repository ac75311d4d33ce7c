#include "engine/calls/buffer.h"

#include <algorithm>

#include "common/error.h"

namespace smddp::engine::calls {

void Buffer::usePieces(const Pieces& pieces) {
  pieces_ = pieces;
  ends_.reserve(pieces.size());
  int64_t end = 0;
  for (const Piece& piece : pieces) ends_.push_back(end += static_cast<int64_t>(piece.size()));
}

// Example: pieces of 8 and 4 bytes have the ends 8 and 12. Offset 8 is the first byte of the second one.
Piece Buffer::find(int64_t offset, int64_t length) const {
  const auto end = std::upper_bound(ends_.begin(), ends_.end(), offset);
  if (end == ends_.end()) {
    raise(ErrorKind::Internal, "a plan reads {} bytes beyond its buffer",
          offset + length - ends_.back());
  }
  const Piece& piece = pieces_[static_cast<size_t>(end - ends_.begin())];
  const int64_t left = *end - offset;
  return piece.part(piece.size() - static_cast<size_t>(left),
                    static_cast<size_t>(std::min(length, left)));
}

}  // namespace smddp::engine::calls
