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
  // The processor combines stores into one write to memory for whole lines only.
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
  // Streaming stores are not ordered with later stores, so a fence is needed.
  _mm_sfence();
}

#else

// Other processors manage their caches during a long copy themselves.
void streamCopy(void* destination, const void* source, size_t bytes) {
  std::memcpy(destination, source, bytes);
}

#endif

}  // namespace smddp
