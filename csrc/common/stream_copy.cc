#include "common/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace smddp {

#if defined(__x86_64__)

void streamCopy(void* destination, const void* source, size_t bytes) {
  constexpr size_t kLine = 64;
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  // Only whole lines are combined into one write to memory.
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kLine);
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
    __m128i part[4];
    for (int i = 0; i < 4; ++i)
      part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, part[i]);
  }
  std::memcpy(to, from, bytes);
  // Streaming stores are not ordered with those that follow.
  _mm_sfence();
}

#else

// Other processors decide for themselves what a long copy leaves in their caches.
void streamCopy(void* destination, const void* source, size_t bytes) {
  std::memcpy(destination, source, bytes);
}

#endif

}  // namespace smddp
