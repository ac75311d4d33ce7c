// Tests when yields are avoided, and for how long.
#include "engine/process/yield_backoff.h"

#include <gtest/gtest.h>

namespace smddp::test {
namespace {

using engine::process::YieldBackoff;

constexpr Nanoseconds kMin = YieldBackoff::kMinPeriod;
constexpr Nanoseconds kMax = YieldBackoff::kMaxPeriod;
constexpr Nanoseconds kStart = 1'000'000'000;

// Loses a time slice that ends at `now`. Returns how long yields are avoided then.
Nanoseconds lose(YieldBackoff& backoff, Nanoseconds now) {
  backoff.yielded(now - YieldBackoff::kLostSlice, now);
  EXPECT_TRUE(backoff.avoidsYields(now));
  Nanoseconds period = kMin / 4;
  while (backoff.avoidsYields(now + period)) period *= 2;
  EXPECT_TRUE(backoff.avoidsYields(now + period - 1));
  return period;
}

TEST(YieldBackoffTest, ShortYieldsAreNoneOfIt) {
  YieldBackoff backoff;
  EXPECT_FALSE(backoff.avoidsYields(kStart));
  backoff.yielded(kStart, kStart + YieldBackoff::kLostSlice - 1);
  EXPECT_FALSE(backoff.avoidsYields(kStart + YieldBackoff::kLostSlice - 1));
}

TEST(YieldBackoffTest, AvoidsYieldsForLongerEachTime) {
  YieldBackoff backoff;
  Nanoseconds now = kStart;
  for (Nanoseconds period = kMin; period <= kMax; period *= 2) {
    EXPECT_EQ(lose(backoff, now), period);
    now += period + YieldBackoff::kLostSlice;
  }
  EXPECT_EQ(lose(backoff, now), kMax);
}

TEST(YieldBackoffTest, ShortYieldsMakeUpForLostOnes) {
  YieldBackoff backoff;
  Nanoseconds now = kStart;
  for (int i = 0; i < 3; ++i) lose(backoff, now += kMax);
  for (int i = 0; i < 2; ++i) backoff.yielded(now + kMax, now + kMax + 1);
  EXPECT_EQ(lose(backoff, now + 2 * kMax), 2 * kMin);
  for (int i = 0; i < 64; ++i) backoff.yielded(now + 3 * kMax, now + 3 * kMax + 1);
  EXPECT_EQ(lose(backoff, now + 4 * kMax), kMin);
}

}  // namespace
}  // namespace smddp::test
