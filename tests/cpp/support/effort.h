// How long the long vectors of a test are. Their lengths are free to choose as long as they are cut into several
// chunks, and ThreadSanitizer, which looks at every access, takes ten times as long for each byte.
#pragma once

#include <cstddef>

namespace smddp::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr size_t kShortening = 8;
#else
inline constexpr size_t kShortening = 1;
#endif

constexpr size_t longCount(size_t count) { return count / kShortening; }

}  // namespace smddp::test
