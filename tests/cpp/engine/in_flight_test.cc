// Several operations at a time: asynchronous ones, fused ones, groups used in turn and from several threads.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <numeric>
#include <random>

#include "engine/calls.h"
#include "support/ranks.h"

namespace smddp::test {
namespace {

using engine::calls::CompletionPtr;

// A vector of floats in which rank r has r + seed + i at i, and the expected sum.
struct Vector {
  Vector(const RankContext& rank, size_t count, int seed) : values(count), seed(seed) {
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(rank.rank + at(i));
  }
  bool isSumOver(int ranks) const {
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i] != static_cast<float>(ranks * (ranks - 1) / 2 + ranks * at(i))) return false;
    }
    return true;
  }
  int at(size_t i) const { return seed + static_cast<int>(i % 100); }

  std::vector<float> values;
  int seed;
};

CompletionPtr begin(RankContext& rank, engine::groups::Group& group,
                    engine::calls::Request request) {
  request.timeout = kTimeout;
  return rank.engine.submit(group, std::move(request));
}

void finish(RankContext& rank, const CompletionPtr& completion) {
  rank.engine.wait(*rank.group, *completion);
  if (completion->error()) throw *completion->error();
}

class InFlightTest : public testing::TestWithParam<Job> {};
class FusionTest : public InFlightTest {};

const std::vector<std::vector<int>> kLayouts{{1}, {3}, {2, 2}, {1, 1, 1}};
INSTANTIATE_TEST_SUITE_P(Layouts, InFlightTest, testing::ValuesIn(jobsOf(kLayouts)));
INSTANTIATE_TEST_SUITE_P(Layouts, FusionTest, testing::ValuesIn(jobsOf(kLayouts)));

// A single vector is copied before the arrival, several fused ones are not.
void useShorterOneShot(Settings& settings) { settings.oneShotBytes = 2048; }
INSTANTIATE_TEST_SUITE_P(LongerTogether, FusionTest,
                         testing::ValuesIn(jobsOf(kLayouts, useShorterOneShot)));

// Plans are dropped as soon as nothing runs them.
void useNoPlanCache(Settings& settings) { settings.planCacheBytes = 0; }
INSTANTIATE_TEST_SUITE_P(NoPlanCache, InFlightTest,
                         testing::ValuesIn(jobsOf(kLayouts, useNoPlanCache)));
INSTANTIATE_TEST_SUITE_P(NoPlanCache, FusionTest,
                         testing::ValuesIn(jobsOf(kLayouts, useNoPlanCache)));

TEST_P(InFlightTest, AsynchronousOperationsOfAllSizes) {
  runRanks(GetParam(), [](RankContext& rank) {
    std::vector<Vector> vectors;
    std::vector<CompletionPtr> completions;
    for (const size_t count : {10, 500'000, 0, 1, 70'000, 3, 9000, 200'000}) {
      vectors.emplace_back(rank, count, static_cast<int>(vectors.size()));
    }
    for (Vector& vector : vectors) {
      completions.push_back(begin(rank, *rank.group, allReduce(bytesOf(vector.values))));
      completions.push_back(begin(rank, *rank.group, barrier()));
    }
    // Wait for the last one first. Operations end in order, so then all have ended.
    finish(rank, completions.back());
    for (const auto& completion : completions) finish(rank, completion);
    for (const Vector& vector : vectors) EXPECT_TRUE(vector.isSumOver(rank.size));
    for (size_t i = 0; i < completions.size(); ++i) EXPECT_EQ(completions[i]->sequence(), i + 1);
  });
}

// The sums grow by the number of ranks with each call, and overlap in parts with those of a second vector.
TEST_P(InFlightTest, CallsOnTheSameMemoryRunInTheOrderCalled) {
  runRanks(GetParam(), [](RankContext& rank) {
    for (const size_t count : {4, 700, 70'000, 300'000}) {
      std::vector<int32_t> elsewhere(500'000, 1);
      std::vector<int32_t> values(count, rank.rank + 1);
      const Bytes all = bytesOf(values);
      const Bytes second = all.subspan(count / 2 * sizeof(int32_t));
      const auto sum = [&](Bytes data) {
        return begin(rank, *rank.group, allReduce(data, DataType::int32));
      };
      // The first one takes its time, so that the others wait in the queue.
      const std::vector<CompletionPtr> completions{
          sum(bytesOf(elsewhere)),
          sum(all),
          sum(all),
          sum(second),
          begin(rank, *rank.group, broadcast(all, rank.size - 1)),
          sum(second),
          sum(all)};
      for (const auto& completion : completions) finish(rank, completion);
      int32_t expected = rank.size * (rank.size + 1) / 2 * rank.size * rank.size;
      for (size_t i = 0; i < count; ++i) {
        if (i == count / 2) expected *= rank.size * rank.size;
        ASSERT_EQ(values[i], expected) << i << " of " << count;
      }
    }
  });
}

// A list counts as one range, so calls on lists whose tensors lie in turns wait for one another, and end.
TEST_P(InFlightTest, ListsThatLieInTurnsEnd) {
  runRanks(GetParam(), [](RankContext& rank) {
    std::vector<int32_t> values(4000, rank.rank + 1);
    const Bytes all = bytesOf(values);
    std::vector<CompletionPtr> completions;
    for (size_t first = 0; first < 2; ++first) {
      engine::calls::Request request = allReduce(all.first(8000), DataType::int32);
      request.output.clear();
      for (size_t block = first; block < 20; block += 2) {
        request.output.emplace_back(all.subspan(block * 800, 800));
      }
      completions.push_back(begin(rank, *rank.group, std::move(request)));
    }
    for (const auto& completion : completions) finish(rank, completion);
    EXPECT_EQ(values, std::vector<int32_t>(4000, rank.size * (rank.size + 1) / 2));
  });
}

TEST_P(InFlightTest, ABarrierEndsAfterWhatWasCalledBeforeIt) {
  runRanks(GetParam(), [](RankContext& rank) {
    for (int round = 0; round < 20; ++round) {
      std::vector<Vector> vectors;
      std::vector<CompletionPtr> completions;
      for (const size_t count : {300'000, 10, 70'000}) vectors.emplace_back(rank, count, round);
      for (Vector& vector : vectors) {
        completions.push_back(begin(rank, *rank.group, allReduce(bytesOf(vector.values))));
      }
      finish(rank, begin(rank, *rank.group, barrier()));
      for (const auto& completion : completions) EXPECT_TRUE(completion->done());
    }
  });
}

// Ranks take turns to be ahead of each other, so that they have different numbers of waiting requests.
TEST_P(FusionTest, SmallAllReducesMayBeFused) {
  runRanks(GetParam(), [](RankContext& rank) {
    std::mt19937 random(static_cast<unsigned>(7 + rank.rank));
    for (int round = 0; round < 20; ++round) {
      std::vector<Vector> vectors;
      for (int i = 0; i < 32; ++i) vectors.emplace_back(rank, 1 + i * 37 % 700, round + i);
      std::vector<CompletionPtr> completions;
      for (Vector& vector : vectors) {
        completions.push_back(begin(rank, *rank.group, allReduce(bytesOf(vector.values))));
        const unsigned pace = random() % 8;
        if (pace == 0) finish(rank, completions.back());
        if (pace == 1) std::this_thread::yield();
      }
      for (const auto& completion : completions) finish(rank, completion);
      for (const Vector& vector : vectors) EXPECT_TRUE(vector.isSumOver(rank.size));
    }
  });
}

// Consecutive requests that differ in type or operation must not be fused.
TEST_P(InFlightTest, DifferentAllReducesAreKeptApart) {
  runRanks(GetParam(), [](RankContext& rank) {
    std::vector<std::vector<int32_t>> values(40, std::vector<int32_t>(5, rank.rank + 1));
    std::vector<CompletionPtr> completions;
    for (size_t i = 0; i < values.size(); ++i) {
      const ReduceOp op = i % 3 == 0 ? ReduceOp::MAX : ReduceOp::SUM;
      completions.push_back(
          begin(rank, *rank.group, allReduce(bytesOf(values[i]), DataType::int32, op)));
    }
    for (const auto& completion : completions) finish(rank, completion);
    for (size_t i = 0; i < values.size(); ++i) {
      const int expected = i % 3 == 0 ? rank.size : rank.size * (rank.size + 1) / 2;
      EXPECT_EQ(values[i], std::vector<int32_t>(5, expected)) << i;
    }
  });
}

TEST_P(InFlightTest, ContinuationsRunOnceAndMaySubmit) {
  runRanks(GetParam(), [](RankContext& rank) {
    Vector first(rank, 1000, 1), second(rank, 2000, 2);
    std::atomic<int> runs{0};
    CompletionPtr next;
    const auto completion = begin(rank, *rank.group, allReduce(bytesOf(first.values)));
    completion->then([&] {
      auto request = allReduce(bytesOf(second.values));
      request.willWait = true;
      next = begin(rank, *rank.group, std::move(request));
      ++runs;
    });
    finish(rank, completion);
    while (runs == 0) std::this_thread::yield();
    finish(rank, next);
    EXPECT_EQ(runs, 1);
    EXPECT_TRUE(first.isSumOver(rank.size) && second.isSumOver(rank.size));
  });
}

// Each group has its own order; two groups are not ordered.
// A receive may stay unanswered for ever.
TEST_P(InFlightTest, OpenCallsAreWaitedForButNotReceives) {
  runRanks(GetParam(), [](RankContext& rank) {
    if (rank.size == 1) return;
    Block never(4);
    engine::calls::Message receive;
    receive.peer = (rank.rank + 1) % rank.size;
    receive.buffer = {never.bytes()};
    receive.timeout = kTimeout;
    const auto open = rank.engine.submit(*rank.group, std::move(receive));
    std::vector<Vector> vectors;
    for (const size_t count : {500'000, 3, 70'000}) vectors.emplace_back(rank, count, 1);
    std::vector<CompletionPtr> calls;
    for (Vector& vector : vectors) {
      calls.push_back(begin(rank, *rank.group, allReduce(bytesOf(vector.values))));
    }
    rank.engine.waitForOpenCalls(*rank.group, {});
    for (const auto& call : calls) EXPECT_TRUE(call->done());
    for (const auto& call : calls) finish(rank, call);
    EXPECT_FALSE(open->done());
    EXPECT_TRUE(rank.engine.withdraw(*rank.group, {open}).empty());
  });
}

// What the network may still read lives as long as the group.
TEST_P(InFlightTest, MemoryIsKeptForTheLifeOfTheGroup) {
  runRanks(GetParam(), [](RankContext& rank) {
    auto group = rank.engine.createGroup(rank.store, {"kept", rank.rank, rank.size}, kTimeout);
    auto memory = std::make_shared<int>(1);
    const std::weak_ptr<int> seen = memory;
    rank.engine.keep(*group, std::move(memory));
    finish(rank, begin(rank, *group, barrier()));
    EXPECT_FALSE(seen.expired());
    rank.engine.destroyGroup(group);
    group.reset();
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!seen.expired() && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_TRUE(seen.expired());
  });
}

TEST_P(InFlightTest, TwoGroupsInTurn) {
  runRanks(GetParam(), [](RankContext& rank) {
    const auto other =
        rank.engine.createGroup(rank.store, {"other", rank.rank, rank.size}, kTimeout);
    for (int round = 0; round < 20; ++round) {
      Vector a(rank, 5000, round), b(rank, 90'000, round + 1);
      auto* firstGroup = rank.group.get();
      auto* secondGroup = other.get();
      // Odd ranks submit in the other order.
      std::vector<CompletionPtr> completions;
      const auto one = [&] {
        completions.push_back(begin(rank, *firstGroup, allReduce(bytesOf(a.values))));
      };
      const auto two = [&] {
        completions.push_back(begin(rank, *secondGroup, allReduce(bytesOf(b.values))));
      };
      rank.rank % 2 == 0 ? (one(), two()) : (two(), one());
      for (const auto& completion : completions) finish(rank, completion);
      EXPECT_TRUE(a.isSumOver(rank.size) && b.isSumOver(rank.size));
    }
    rank.engine.destroyGroup(other);
  });
}

TEST_P(InFlightTest, TwoThreadsOnTwoGroups) {
  runRanks(GetParam(), [](RankContext& rank) {
    const auto other =
        rank.engine.createGroup(rank.store, {"other", rank.rank, rank.size}, kTimeout);
    const auto work = [&rank](engine::groups::Group& group, int seed) {
      for (int round = 0; round < 30; ++round) {
        Vector vector(rank, 1 + 997 * static_cast<size_t>(round), seed + round);
        auto request = allReduce(bytesOf(vector.values));
        request.willWait = round % 2 == 0;
        finish(rank, begin(rank, group, std::move(request)));
        EXPECT_TRUE(vector.isSumOver(rank.size));
      }
    };
    std::thread second([&] { work(*other, 50); });
    work(*rank.group, 0);
    second.join();
  });
}

// Ranks that are in one sub-group only, and sub-groups whose rank numbers differ from those in the world.
TEST_P(InFlightTest, SubGroups) {
  runRanks(GetParam(), [](RankContext& rank) {
    const int parity = rank.rank % 2;
    const int size = (rank.size + 1 - parity) / 2;
    const Rank me = size - 1 - rank.rank / 2;
    const auto group =
        rank.engine.createGroup(rank.store, {fmt::format("parity {}", parity), me, size}, kTimeout);
    std::vector<int32_t> ranks(static_cast<size_t>(size), -1);
    std::vector<int32_t> mine{rank.rank};
    finish(rank, begin(rank, *group, allGather(bytesOf(mine), {bytesOf(ranks)})));
    for (int i = 0; i < size; ++i)
      EXPECT_EQ(ranks[static_cast<size_t>(i)], parity + 2 * (size - 1 - i));
    rank.run(barrier());
  });
}

// The thread that ends the operation runs no continuations: it has called the engine for something else, and takes the
// operation up when it lets go.
TEST(ContinuationTest, RunsSoonWhoeverEndsTheOperation) {
  runRanks({1}, [](RankContext& rank) {
    constexpr int kRounds = 20;
    int late = 0;
    for (int round = 0; round < kRounds; ++round) {
      const auto completion = std::make_shared<engine::calls::Completion>();
      std::promise<void> ended;
      completion->then([&] { ended.set_value(); });
      rank.engine.progress().call([&] {
        std::thread([&] {
          auto request = barrier();
          request.timeout = kTimeout;
          rank.engine.enqueue(*rank.group, std::move(request), completion);
        }).join();
      });
      auto told = ended.get_future();
      if (told.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready) ++late;
      told.wait();
    }
    // A progress thread looks every 250 ms, so without help four of five would be late.
    EXPECT_LT(late, kRounds / 2);
  });
}

// A continuation waits for an event that another continuation signals, as with torch's futures.
TEST_P(InFlightTest, ContinuationsMayWaitForOneAnother) {
  runRanks(GetParam(), [](RankContext& rank) {
    constexpr int kDepth = 5;
    std::vector<Vector> vectors;
    for (int i = 0; i <= kDepth; ++i) vectors.emplace_back(rank, 100, i);
    std::function<void(int)> descend = [&](int depth) {
      const auto completion = begin(rank, *rank.group, allReduce(bytesOf(vectors[depth].values)));
      const auto ended = std::make_shared<std::promise<void>>();
      auto told = ended->get_future();
      completion->then([&, ended, depth] {
        if (depth < kDepth) descend(depth + 1);
        ended->set_value();
      });
      told.wait();
    };
    descend(0);
    for (const Vector& vector : vectors) EXPECT_TRUE(vector.isSumOver(rank.size));
  });
}

}  // namespace
}  // namespace smddp::test
