#include "engine/buffer.h"

#include <algorithm>

#include "common/error.h"

namespace smddp::engine {

Buffer::Run Buffer::find(int64_t offset, int64_t length) const {
  for (const auto& piece : *pieces_) {
    const auto bytes = static_cast<int64_t>(piece.size());
    if (offset < bytes) return {piece.data() + offset, std::min(length, bytes - offset)};
    offset -= bytes;
  }
  raise(ErrorKind::Internal, "a plan reads {} bytes beyond its buffer", offset + length);
}

}  // namespace smddp::engine
