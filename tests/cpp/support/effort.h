// Adapts tests to ThreadSanitizer, which checks every access and takes ten times as long for each byte.
//
// Long vectors are shorter; they only need several chunks. A few types stand for all, because the threads do the same
// for each. Time-outs within which other ranks must answer are longer.
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
