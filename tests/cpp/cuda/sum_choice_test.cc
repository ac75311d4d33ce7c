// Whether the CPU or the GPU sums between nodes.
#include "cuda/sum_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "common/error.h"

namespace smddp::cuda {
namespace {

SumPlace choose(const std::vector<SumTimes>& ranks) { return chooseSum(slowest(ranks)); }

TEST(SumChoice, TakesTheGpuOnlyWhereItIsClearlyQuicker) {
  EXPECT_EQ(choose({{1000, 500}}), SumPlace::Gpu);
  EXPECT_EQ(choose({{1000, 899}}), SumPlace::Gpu);
  EXPECT_EQ(choose({{1000, 900}}), SumPlace::Cpu);
  EXPECT_EQ(choose({{1000, 1000}}), SumPlace::Cpu);
  EXPECT_EQ(choose({{1000, 3000}}), SumPlace::Cpu);
}

TEST(SumChoice, CountsTheSlowestRank) {
  EXPECT_EQ(choose({{1000, 100}, {1000, 1000}, {1000, 100}}), SumPlace::Cpu);
  EXPECT_EQ(choose({{100, 500}, {1000, 500}}), SumPlace::Gpu);
}

TEST(SumChoice, IsTheSameWhateverTheOrderOfRanks) {
  EXPECT_EQ(choose({{1000, 100}, {10, 899}}), choose({{10, 899}, {1000, 100}}));
}

TEST(SumChoice, BearsTimesOfAnyLength) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(choose({{most, most}}), SumPlace::Cpu);
  EXPECT_EQ(choose({{most, 1}}), SumPlace::Gpu);
  EXPECT_EQ(choose({{0, 0}}), SumPlace::Cpu);
}

TEST(SumChoice, ReadsTheSetting) {
  EXPECT_EQ(parseSumSetting("auto"), SumSetting::Auto);
  EXPECT_EQ(parseSumSetting("cpu"), SumSetting::Cpu);
  EXPECT_EQ(parseSumSetting("gpu"), SumSetting::Gpu);
}

}  // namespace
}  // namespace smddp::cuda
