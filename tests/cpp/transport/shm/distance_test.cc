#include "transport/shm/distance.h"

#include <gtest/gtest.h>

#include "common/error.h"

namespace smddp::transport::shm {
namespace {

constexpr Nanoseconds kNear = 20;
constexpr Nanoseconds kMemory = 90;
constexpr Nanoseconds kFar = 130;

void see(Distance& distance, Nanoseconds duration, int times) {
  for (int i = 0; i < times; ++i) distance.saw(duration);
}

TEST(Distance, FollowsWhatMostLoadsTook) {
  Distance distance(StagingStores::Auto, kMemory);
  EXPECT_FALSE(distance.streams());
  see(distance, kNear, 1000);
  see(distance, kFar, 256);
  EXPECT_TRUE(distance.streams());
  see(distance, kFar, 1000);
  see(distance, kNear, 256);
  EXPECT_FALSE(distance.streams());
}

TEST(Distance, OneThatWasInterruptedChangesNothing) {
  Distance distance(StagingStores::Auto, kMemory);
  for (int i = 0; i < 20; ++i) {
    see(distance, 1'000'000, 1);
    see(distance, kNear, 2);
    ASSERT_FALSE(distance.streams());
  }
  see(distance, kFar, 600);
  for (int i = 0; i < 20; ++i) {
    see(distance, kNear, 1);
    see(distance, kFar, 2);
    ASSERT_TRUE(distance.streams());
  }
}

// The loads are slow, as no clock and no interruption can make them fast.
TEST(Distance, LearnsOnlyFromValuesThatChanged) {
  Distance distance(StagingStores::Auto, kMemory);
  const MonotonicClock clock;
  const auto slowly = [&](uint64_t value) {
    const Deadline end = Deadline::after(clock, clockCost() + 10 * kFar);
    while (!end.passed(clock)) {
    }
    return value;
  };
  uint64_t seen = 7;
  for (int i = 0; i < 100; ++i) EXPECT_EQ(distance.timed(seen, [&] { return slowly(7); }), 7u);
  EXPECT_FALSE(distance.streams()) << "a line that is already here says nothing";
  for (uint64_t i = 8; i < 264; ++i) EXPECT_EQ(distance.timed(seen, [&] { return slowly(i); }), i);
  EXPECT_EQ(seen, 263u);
  EXPECT_TRUE(distance.streams());
}

// The same loads are near where memory is slower than the way between caches.
TEST(Distance, IsFarOnlyWhereMemoryIsNearer) {
  Distance distance(StagingStores::Auto, kFar);
  see(distance, kFar * 5 / 4, 1000);
  EXPECT_FALSE(distance.streams());
  see(distance, kFar * 5 / 4 + 1, 256);
  EXPECT_TRUE(distance.streams());
}

TEST(Distance, KnowsHowLongMemoryTakes) { EXPECT_GT(memoryLatency(), 0); }

TEST(Distance, IsOverruledByTheSetting) {
  Distance always(StagingStores::Streaming);
  see(always, kNear, 100);
  EXPECT_TRUE(always.streams());
  Distance never(StagingStores::Ordinary);
  uint64_t seen = 0;
  for (uint64_t i = 1; i < 100; ++i) never.timed(seen, [&] { return i; });
  EXPECT_FALSE(never.streams());
}

TEST(Distance, SaysWhatTheSettingMayBe) {
  EXPECT_EQ(parseStagingStores("auto"), StagingStores::Auto);
  EXPECT_EQ(parseStagingStores("ordinary"), StagingStores::Ordinary);
  EXPECT_EQ(parseStagingStores("streaming"), StagingStores::Streaming);
  try {
    parseStagingStores("fast");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Usage);
    EXPECT_STREQ(error.what(), "SMDDP_STAGING_STORES=fast: expects auto, ordinary or streaming");
  }
}

}  // namespace
}  // namespace smddp::transport::shm
