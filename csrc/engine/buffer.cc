#include "engine/buffer.h"

#include <algorithm>

#include "common/error.h"

namespace smddp::engine {

Piece Buffer::find(int64_t offset, int64_t length) const {
  for (const Piece& piece : *pieces_) {
    const auto bytes = static_cast<int64_t>(piece.size());
    if (offset < bytes) {
      return piece.part(static_cast<size_t>(offset),
                        static_cast<size_t>(std::min(length, bytes - offset)));
    }
    offset -= bytes;
  }
  raise(ErrorKind::Internal, "a plan reads {} bytes beyond its buffer", offset + length);
}

}  // namespace smddp::engine
