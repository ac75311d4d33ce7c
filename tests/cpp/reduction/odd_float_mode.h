// Runs a function in another floating-point mode than usual, as a caller may have set it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>

namespace smddp::reduction {

// Denormals are flushed and ignored, numbers are rounded up. Expects that `run` leaves the mode as it was.
template <typename Function>
void inOddFloatMode(const Function& run) {
  const uint32_t before = _mm_getcsr();
  const uint32_t odd = 0x1f80 | 0x8040 | 0x4000;
  _mm_setcsr(odd);
  run();
  const uint32_t after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(after & ~0x3fu, odd);
}

}  // namespace smddp::reduction
#endif
