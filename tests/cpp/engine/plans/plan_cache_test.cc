// The plan cache: what it keeps when there are more shapes than it has room for.
#include "engine/plans/plan_cache.h"

#include <gtest/gtest.h>
#include <malloc.h>

namespace smddp::engine::plans {
namespace {

using collectives::Collective;
using collectives::Shape;

constexpr size_t kLimit = 64 << 10;

class PlanCacheTest : public testing::Test {
 protected:
  static Settings withRoom(size_t bytes) {
    Settings settings;
    settings.planCacheBytes = static_cast<int64_t>(bytes);
    return settings;
  }
  static Shape sum(int64_t elements) { return {Collective::AllReduce, 4 * elements}; }
  void askForOthers(int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) cache_.get(sum(first + i));
  }

  const plan::Topology topology_ = plan::Topology::fromNames({"a", "a", "b"}, 0);
  const plan::Limits limits_{};
  PlanCache cache_{topology_, limits_, withRoom(kLimit)};
};

// Zero where malloc is not glibc's, as under sanitizers.
size_t heapInUse() {
  const auto info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

TEST_F(PlanCacheTest, SizesThatNeverRepeatTakeNoMoreThanTheLimit) {
  const size_t before = heapInUse();
  askForOthers(1, 1000);
  EXPECT_GT(cache_.size(), 4u);
  EXPECT_LE(cache_.bytes(), kLimit);
  const size_t filled = heapInUse();
  EXPECT_LT(filled - before, 2 * kLimit) << "the cache does not count all that it keeps";
  askForOthers(10'000, 20'000);
  EXPECT_LE(cache_.bytes(), kLimit);
  EXPECT_LT(heapInUse(), filled + kLimit / 2);
}

TEST_F(PlanCacheTest, WhatIsUsedAgainAndAgainStays) {
  const auto* const often = &cache_.get(sum(7));
  for (int64_t i = 0; i < 1000; ++i) {
    askForOthers(100 + i, 1);
    ASSERT_EQ(&cache_.get(sum(7)), often) << i;
  }
}

TEST_F(PlanCacheTest, WhatIsHeldStays) {
  PlanCache::Held held(cache_.get(sum(7)));
  PlanCache::Held other(cache_.get({Collective::Barrier, 0}));
  askForOthers(100, 1000);
  EXPECT_EQ(held->shape, sum(7));
  EXPECT_EQ(&cache_.get(sum(7)).cached, &held->cached);
  // It is held once still.
  other = PlanCache::Held(cache_.get(sum(7)));
  held = PlanCache::Held();
  askForOthers(100, 1000);
  EXPECT_EQ(other->shape, sum(7));
  const size_t withHeld = cache_.size();
  other = PlanCache::Held();
  askForOthers(100, 1000);
  EXPECT_LE(cache_.bytes(), kLimit);
  EXPECT_LE(cache_.size(), withHeld + 1);
}

TEST_F(PlanCacheTest, OnePlanIsKeptWithoutAnyRoom) {
  PlanCache none(topology_, limits_, withRoom(0));
  EXPECT_EQ(none.get(sum(7)).shape, sum(7));
  EXPECT_EQ(none.get(sum(8)).shape, sum(8));
  EXPECT_EQ(none.size(), 1u);
}

// 2^24 chunks of 64 bytes are 1 GiB.
TEST_F(PlanCacheTest, MoreChunksThanCountersHoldAreRefused) {
  const plan::Limits small{.chunkBytes = 64, .fabricChunkBytes = 64, .messageBytes = 64};
  for (const auto& nodes : {std::vector<std::string>{"a", "a"}, {"a", "a", "b"}}) {
    const auto topology = plan::Topology::fromNames(nodes, 0);
    PlanCache cache(topology, small, Settings());
    EXPECT_NO_THROW(cache.get(sum(1 << 20)));
    try {
      cache.get(sum(1 << 29));
      FAIL() << nodes.size();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::Usage);
      EXPECT_NE(std::string(error.what()).find("raise SMDDP_CHUNK_BYTES"), std::string::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace smddp::engine::plans
