// When yields are avoided, and for how long.
#include "engine/crowding.h"

#include <gtest/gtest.h>

namespace smddp::test {
namespace {

using engine::Crowding;

constexpr Nanoseconds kMin = Crowding::kMinPeriod;
constexpr Nanoseconds kMax = Crowding::kMaxPeriod;
constexpr Nanoseconds kStart = 1'000'000'000;

// Loses a turn that ends at `now`; returns for how long yields are avoided then.
Nanoseconds lose(Crowding& crowding, Nanoseconds now) {
  crowding.yielded(now - Crowding::kLostTurn, now);
  EXPECT_TRUE(crowding.isCrowded(now));
  Nanoseconds period = kMin / 4;
  while (crowding.isCrowded(now + period)) period *= 2;
  EXPECT_TRUE(crowding.isCrowded(now + period - 1));
  return period;
}

TEST(CrowdingTest, ShortYieldsAreNoneOfIt) {
  Crowding crowding;
  EXPECT_FALSE(crowding.isCrowded(kStart));
  crowding.yielded(kStart, kStart + Crowding::kLostTurn - 1);
  EXPECT_FALSE(crowding.isCrowded(kStart + Crowding::kLostTurn - 1));
}

TEST(CrowdingTest, AvoidsYieldsForLongerEachTime) {
  Crowding crowding;
  Nanoseconds now = kStart;
  for (Nanoseconds period = kMin; period <= kMax; period *= 2) {
    EXPECT_EQ(lose(crowding, now), period);
    now += period + Crowding::kLostTurn;
  }
  EXPECT_EQ(lose(crowding, now), kMax);
}

TEST(CrowdingTest, ShortYieldsMakeUpForLostOnes) {
  Crowding crowding;
  Nanoseconds now = kStart;
  for (int i = 0; i < 3; ++i) lose(crowding, now += kMax);
  for (int i = 0; i < 2; ++i) crowding.yielded(now + kMax, now + kMax + 1);
  EXPECT_EQ(lose(crowding, now + 2 * kMax), 2 * kMin);
  for (int i = 0; i < 64; ++i) crowding.yielded(now + 3 * kMax, now + 3 * kMax + 1);
  EXPECT_EQ(lose(crowding, now + 4 * kMax), kMin);
}

}  // namespace
}  // namespace smddp::test
