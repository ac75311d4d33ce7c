// What ThreadSanitizer, which looks at every access and takes ten times as long for each byte, asks of a test.
//
// Long vectors are shorter: their lengths are free to choose as long as they are cut into several chunks.
// A few types stand for all: to threads they are the same. Time-outs in which others still have to say
// something are longer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smddp::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr size_t kShortening = 8;
inline constexpr bool kAllTypes = false;
inline constexpr int64_t kSlowdown = 5;
#else
inline constexpr size_t kShortening = 1;
inline constexpr bool kAllTypes = true;
inline constexpr int64_t kSlowdown = 1;
#endif

constexpr size_t longCount(size_t count) { return count / kShortening; }

}  // namespace smddp::test
