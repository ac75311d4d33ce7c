// Allreduces in other formats between nodes, and which format is worth what it loses.
#include "engine/wire_choice.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "engine/calls.h"
#include "support/ranks.h"

namespace smddp::engine {
namespace {

using test::RankContext;

constexpr size_t kCount = 100'003;

// Sums a vector that lies in pieces over all ranks, and returns it.
std::vector<float> summed(RankContext& rank, groups::Group& group) {
  std::vector<float> values(kCount);
  for (size_t i = 0; i < kCount; ++i) values[i] = static_cast<float>(rank.rank + i % 97);
  auto request = test::allReduce(test::bytesOf(values));
  const test::Bytes all = request.output.front();
  // No piece begins or ends where a chunk does.
  request.output = {all.first(4), all.subspan(4, 10'004), all.subspan(10'008)};
  request.timeout = test::kTimeout;
  rank.engine.run(group, std::move(request));
  for (size_t i = 0; i < kCount; ++i) {
    const auto expected = static_cast<float>(rank.size * (rank.size - 1)) / 2 +
                          static_cast<float>(rank.size) * static_cast<float>(i % 97);
    // int8 has steps of 1/127 of the largest number nearby.
    EXPECT_NEAR(values[i], expected, 4 + 0.02f * expected) << i;
    if (testing::Test::HasFailure()) break;
  }
  return values;
}

groups::GroupSpec specOf(const RankContext& rank, const std::string& wire) {
  groups::GroupSpec spec{"in " + wire, rank.rank, rank.size};
  spec.options.wire = wire;
  return spec;
}

class WireTest : public testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Layouts, WireTest,
                         testing::Values(std::vector{1, 1}, std::vector{2, 1}, std::vector{2, 2}));

TEST_P(WireTest, SumsInAnyFormatAreTheSameOnAllRanks) {
  for (const std::string wire : {"bf16", "int8", "int8+feedback"}) {
    std::vector<std::vector<float>> sums(8);
    test::runRanks(GetParam(), [&](RankContext& rank) {
      const auto group = rank.engine.createGroup(rank.store, specOf(rank, wire), test::kTimeout);
      sums[static_cast<size_t>(rank.rank)] = summed(rank, *group);
      uint64_t sent = 0;
      for (const auto& [name, use] : group->plans.statistics()) sent += use.fabricBytes;
      EXPECT_LT(sent, kCount * sizeof(float)) << wire << " is shorter than fp32";
    });
    for (const auto& sum : sums) EXPECT_TRUE(sum.empty() || sum == sums[0]) << wire;
  }
}

TEST(WireChoice, AllRanksMeasureAndTakeTheSame) {
  std::vector<std::vector<float>> sums(2);
  std::vector<Wire> chosen(2);
  test::runRanks({1, 1}, [&](RankContext& rank) {
    const auto group = rank.engine.createGroup(rank.store, specOf(rank, "auto"), test::kTimeout);
    chooseWire(rank.engine, group, test::kTimeout);
    chosen[static_cast<size_t>(rank.rank)] = group->plans.wire();
    sums[static_cast<size_t>(rank.rank)] = summed(rank, *group);
  });
  EXPECT_EQ(chosen[0], chosen[1]);
  EXPECT_EQ(sums[0], sums[1]);
}

TEST(WireChoice, TheSlowestRankDecides) {
  // By rank: the times of fp32, bf16, int8.
  struct Case {
    std::array<WireTimes, 2> times;
    Wire chosen;
  };
  test::runRanks({1, 1}, [](RankContext& rank) {
    const auto group = rank.engine.createGroup(rank.store, specOf(rank, "auto"), test::kTimeout);
    for (const auto& [times, chosen] : {Case{{{{12, 7, 6}, {11, 9, 9}}}, Wire::bf16},
                                        Case{{{{12, 5, 3}, {1, 12, 4}}}, Wire::int8},
                                        Case{{{{12, 5, 3}, {1, 12, 11}}}, Wire::fp32}}) {
      const auto& mine = times[static_cast<size_t>(rank.rank)];
      EXPECT_EQ(useWorthwhile(rank.engine, *group, mine, test::kTimeout)[0], 12);
      EXPECT_EQ(group->plans.wire(), chosen);
    }
  });
}

TEST(WireChoice, TakesAShorterFormatOnlyForAQuarterOfTheTime) {
  // By time of fp32, bf16, int8.
  EXPECT_EQ(worthwhile({12, 7, 6}), Wire::bf16);
  EXPECT_EQ(worthwhile({12, 7, 5}), Wire::int8);
  EXPECT_EQ(worthwhile({12, 10, 9}), Wire::int8) << "bf16 is not worth it, but int8 is";
  EXPECT_EQ(worthwhile({12, 10, 10}), Wire::fp32);
  EXPECT_EQ(worthwhile({12, 13, 14}), Wire::fp32);
}

}  // namespace
}  // namespace smddp::engine
