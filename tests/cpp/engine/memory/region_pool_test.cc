#include "engine/memory/region_pool.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace smddp::engine::memory {
namespace {

class RegionPoolTest : public testing::Test {
 protected:
  static RegionHeader& headerOf(std::span<std::byte> region) {
    return *reinterpret_cast<RegionHeader*>(region.data());
  }
  const std::shared_ptr<transport::shm::Slab> slab_ =
      transport::shm::Slab::create(size_t{64} << 20);
  const RegionLayout layout_{.tracks = 2, .halfBytes = 10'000};
  RegionPool pool_{slab_};
};

TEST_F(RegionPoolTest, ARegionGivenUpBelongsToNobodyUntilItIsARegionAgain) {
  const auto region = pool_.take(layout_);
  ASSERT_EQ(region.size(), layout_.bytes());
  auto& header = headerOf(region);
  auto* track = reinterpret_cast<TrackHeader*>(region.data() + layout_.trackOffset(1));
  header.group.store(7);
  header.numBreaks.store(2);
  header.left.store(1);
  header.called.store(9);
  header.blame.store(5);
  track->counters[3].value.store(11);
  track->arrivals[1].number.store(12);
  region.back() = std::byte{13};

  pool_.giveBack(region, layout_);
  EXPECT_EQ(header.group.load(), 0u);
  // A mate may still read the header, and sees that we left.
  EXPECT_EQ(header.left.load(), 1u);
  // These pages are not allocated again.
  const auto other = slab_->allocate(layout_.bytes());
  EXPECT_TRUE(other.data() + other.size() <= region.data() ||
              region.data() + region.size() <= other.data());

  const auto again = pool_.take(layout_);
  EXPECT_EQ(again.data(), region.data());
  EXPECT_EQ(header.group.load(), 0u);
  EXPECT_EQ(header.numBreaks.load(), 0u);
  EXPECT_EQ(header.left.load(), 0u);
  EXPECT_EQ(header.called.load(), 0u);
  EXPECT_EQ(header.blame.load(), 0u);
  EXPECT_EQ(track->counters[3].value.load(), 0u);
  EXPECT_EQ(track->arrivals[1].number.load(), 0u);
  const auto staging = again.subspan(layout_.halfOffset(0, 0));
  EXPECT_TRUE(
      std::all_of(staging.begin(), staging.end(), [](std::byte b) { return b == std::byte{}; }));
}

TEST_F(RegionPoolTest, StagingThatTheNetworkKnowsKeepsItsPages) {
  const auto region = pool_.take(layout_);
  const auto half = region.subspan(layout_.halfOffset(1, 0), kPage);
  const auto next = region.subspan(layout_.halfOffset(1, 1), kPage);
  slab_->commit(region);
  half.front() = next.front() = std::byte{7};
  slab_->keep(half);
  pool_.giveBack(region, layout_);
  EXPECT_EQ(half.front(), std::byte{7});
  EXPECT_EQ(next.front(), std::byte{0});
  EXPECT_EQ(pool_.take(layout_).data(), region.data());
}

TEST_F(RegionPoolTest, TheRegionThatWasUsedLastIsUsedFirst) {
  const auto first = pool_.take(layout_);
  const auto second = pool_.take(layout_);
  pool_.giveBack(first, layout_);
  pool_.giveBack(second, layout_);
  // Groups that come and go fill one region with pages that the network knows, and not all of them in turn.
  for (int group = 0; group < 3; ++group) {
    const auto region = pool_.take(layout_);
    EXPECT_EQ(region.data(), second.data());
    pool_.giveBack(region, layout_);
  }
}

TEST_F(RegionPoolTest, RegionsOfAnotherLayoutAreOthers) {
  const auto region = pool_.take(layout_);
  pool_.giveBack(region, layout_);
  const RegionLayout longer{.tracks = 3, .halfBytes = 10'000};
  const auto other = pool_.take(longer);
  EXPECT_EQ(other.size(), longer.bytes());
  EXPECT_NE(other.data(), region.data());
}

}  // namespace
}  // namespace smddp::engine::memory
