// How much tests do: all of it, a share that TEST_TURN chooses, or less under sanitizers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace smddp::test {

#if defined(SMDDP_SANITIZE_THREAD) || defined(SMDDP_SANITIZE_ADDRESS)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// ThreadSanitizer checks every access and takes ten times as long for each byte. Long vectors are shorter; they only
// need several chunks. A few types stand for all, because the threads do the same for each. Time-outs within which
// other ranks must answer are longer.
#if defined(SMDDP_SANITIZE_THREAD)
inline constexpr size_t kShortening = 8;
inline constexpr bool kAllTypes = false;
inline constexpr int64_t kSlowdown = 5;
#else
inline constexpr size_t kShortening = 1;
inline constexpr bool kAllTypes = true;
inline constexpr int64_t kSlowdown = 1;
#endif

constexpr size_t longCount(size_t count) { return count / kShortening; }

// Every step-th of the numbered cases of a test: first, first + step, first + 2 step, ...
struct Share {
  uint64_t first = 0;
  uint64_t step = 1;

  bool has(uint64_t number) const { return number % step == first; }
};

// One of `parts` shares: another one with each TEST_TURN, and all cases with ALL_SEEDS=1.
inline Share shareOf(uint64_t parts) {
  if (std::getenv("ALL_SEEDS") != nullptr) return {};
  const char* turn = std::getenv("TEST_TURN");
  return {(turn != nullptr ? std::strtoull(turn, nullptr, 10) : 0) % parts, parts};
}

// For tests of functions without threads. They try all cases, which prove the results; the sanitizers look for misuse
// of memory, which a part of the cases shows as well. Seven has no common divisor with the lengths of the tests' loops:
// with eight, a loop over 4 x 2 values would run the same combination each time.
inline Share shareUnderSanitizers() { return shareOf(kSanitized ? 7 : 1); }

}  // namespace smddp::test
