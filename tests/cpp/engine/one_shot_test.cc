// Small vectors whose callers wait, together with calls that do not wait. The sums must be right for any mixture.
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "support/ranks.h"

namespace smddp::test {
namespace {

using collectives::Collective;
using engine::calls::Request;

Request allreduce(std::vector<int64_t>& vector) {
  Request request;
  request.collective = Collective::AllReduce;
  request.type = DataType::int64;
  request.bytes = static_cast<int64_t>(vector.size() * sizeof(int64_t));
  request.output = {std::as_writable_bytes(std::span(vector))};
  request.timeout = kTimeout;
  return request;
}

int64_t valueOf(int rank, int call, size_t i) {
  return 1000 * call + 10 * rank + static_cast<int64_t>(i);
}

class OneShotTest : public testing::TestWithParam<int> {};

// Lengths are equal on all ranks. Ranks differ in whether they wait, leave calls in flight, or come late.
TEST_P(OneShotTest, SumsAreRightHoweverRanksCall) {
  const int size = GetParam();
  constexpr int kCalls = 4000;
  runRanks({size}, [&](RankContext& rank) {
    std::mt19937 lengths(1), mine(static_cast<unsigned>(100 + rank.rank));
    std::vector<std::vector<int64_t>> vectors(kCalls);
    std::vector<engine::calls::CompletionPtr> open;
    for (int call = 0; call < kCalls; ++call) {
      // Sizes below, at and above the limit of slots beside the arrival.
      auto& vector = vectors[call];
      vector.resize(1 + lengths() % 14);
      for (size_t i = 0; i < vector.size(); ++i) vector[i] = valueOf(rank.rank, call, i);
      Request request = allreduce(vector);
      request.willWait = mine() % 4 != 0;
      if (mine() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(mine() % 300));
      open.push_back(rank.engine.submit(*rank.group, std::move(request)));
    }
    for (const auto& completion : open) rank.engine.wait(*rank.group, *completion);
    for (int call = 0; call < kCalls; ++call) {
      ASSERT_FALSE(open[call]->error()) << open[call]->error()->what();
      for (size_t i = 0; i < vectors[call].size(); ++i) {
        int64_t sum = 0;
        for (int r = 0; r < size; ++r) sum += valueOf(r, call, i);
        ASSERT_EQ(vectors[call][i], sum)
            << "call " << call << ", element " << i << ", rank " << rank.rank;
      }
    }
    const auto used = rank.group->plans.statistics();
    ASSERT_EQ(used.size(), 1u);
    EXPECT_EQ(used.begin()->second.calls, uint64_t{kCalls});
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, OneShotTest, testing::Values(2, 3, 4));

TEST(OneShotTest, AnotherLengthIsNoticedByAll) {
  for (const size_t other : {size_t{3}, size_t{30}, size_t{3000}, size_t{300000}}) {
    runRanks({2}, [&](RankContext& rank) {
      for (int i = 0; i < 100; ++i) {
        std::vector<int64_t> same(2, 1);
        rank.run(allreduce(same));
        ASSERT_EQ(same[1], 2);
      }
      std::vector<int64_t> vector(rank.rank == 0 ? 2 : other, 1);
      try {
        rank.run(allreduce(vector));
        FAIL() << "rank " << rank.rank << " has a sum";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::Mismatch) << error.what();
      }
      // All later calls fail, too.
      EXPECT_THROW(rank.run(allreduce(vector)), Error);
    });
  }
}

TEST(OneShotTest, WhoBreaksTheGroupBreaksSmallCallsOfOthers) {
  runRanks({2}, [&](RankContext& rank) {
    std::vector<int64_t> vector(1, 1);
    for (int i = 0; i < 1000; ++i) rank.run(allreduce(vector));
    if (rank.rank == 0) {
      rank.engine.fail(*rank.group, Error(ErrorKind::Aborted, "enough"));
      return;
    }
    try {
      for (;;) rank.run(allreduce(vector));
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::Aborted) << error.what();
    }
  });
}

TEST(OneShotTest, WhoWaitsForNobodyTimesOut) {
  runRanks({2}, [&](RankContext& rank) {
    std::vector<int64_t> vector(1, 1);
    rank.run(allreduce(vector));
    if (rank.rank == 1) return;
    Request request = allreduce(vector);
    request.timeout = 50'000'000;
    try {
      rank.run(std::move(request));
      FAIL() << "there is a sum";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::Timeout) << error.what();
    }
  });
}

}  // namespace
}  // namespace smddp::test
