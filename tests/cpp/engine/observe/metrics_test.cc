#include "engine/observe/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <latch>
#include <sstream>
#include <thread>

#include "engine/calls.h"
#include "engine/observe/metrics_text.h"
#include "engine/observe/metrics_writer.h"
#include "support/ranks.h"

namespace smddp::test {
namespace {

using engine::observe::Metrics;
using testing::HasSubstr;
using testing::Not;

TEST(Metrics, EveryDurationIsWithinTheLimitsOfItsBucket) {
  using namespace engine::observe::durations;
  for (size_t i = 0; i < kLimits; ++i) {
    EXPECT_EQ(bucketOf(limit(i)), i);
    EXPECT_EQ(bucketOf(limit(i) + 1), i + 1);
  }
  EXPECT_EQ(bucketOf(-1), 0u);
  EXPECT_EQ(bucketOf(0), 0u);
  EXPECT_EQ(bucketOf(limit(kLimits - 1) * 1000), kLimits);
}

TEST(Metrics, EverySizeIsInItsClass) {
  using namespace engine::observe::sizes;
  constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;
  EXPECT_EQ(classOf(0), 0u);
  size_t expected = 0;
  for (const int64_t limit : {kKiB, 32 * kKiB, kMiB, 32 * kMiB, kGiB}) {
    EXPECT_EQ(classOf(limit), expected);
    EXPECT_EQ(classOf(limit + 1), ++expected);
  }
  EXPECT_EQ(classOf(1000 * kGiB), kNames.size() - 1);
}

TEST(Metrics, NothingIsLeftOfASnapshotThatCannotTakeItsPlace) {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("metrics_{}", getpid());
  std::filesystem::create_directories(folder / "mine.prom");
  Settings settings;
  settings.metrics.text = folder / "mine";
  engine::observe::MetricsWriter writer(std::make_shared<Metrics>(), settings);
  writer.stop();
  EXPECT_TRUE(std::filesystem::exists(folder / "mine.jsonl"));
  EXPECT_FALSE(std::filesystem::exists(folder / "mine.prom.new"));
  std::filesystem::remove_all(folder);
}

Metrics::CallTotals onlyCallsOf(const Metrics& metrics) {
  const auto totals = metrics.totals();
  EXPECT_EQ(totals.calls.size(), 1u);
  return totals.calls.empty() ? Metrics::CallTotals{} : totals.calls.front();
}

TEST(Metrics, CountsByGroupCollectiveAlgorithmAndSize) {
  Metrics metrics;
  auto& ring = metrics.group("g")->algorithm("allreduce", "ring");
  EXPECT_EQ(&ring, &metrics.group("g")->algorithm("allreduce", "ring"));
  ring.of(100).count(1500, 100);
  ring.of(1000).count(3000, 1000);
  ring.of(1000).countExecution(512, {.node = 7, .network = 9});
  const auto calls = onlyCallsOf(metrics);
  EXPECT_EQ(calls.group + calls.collective + calls.algorithm + calls.size, "gallreducering<=1KiB");
  EXPECT_EQ(calls.calls, 2u);
  EXPECT_EQ(calls.duration, 4500);
  EXPECT_EQ(calls.bytes, 1100u);
  EXPECT_EQ(calls.wireBytes, 512u);
  EXPECT_EQ(calls.waited.node, 7);
  EXPECT_EQ(calls.waited.network, 9);
  EXPECT_EQ(calls.byDuration[1], 1u);
  EXPECT_EQ(calls.byDuration[2], 1u);
  metrics.group("g")->algorithm("allreduce", "ring").of(2000).count(1, 2000);
  EXPECT_EQ(metrics.totals().calls.size(), 2u);
}

TEST(Metrics, TooManyGroupsShareCounters) {
  Metrics metrics;
  for (size_t i = 0; i < 2 * Metrics::kMaxGroups; ++i) {
    metrics.group(std::to_string(i))->algorithm("barrier", "exchange").of(0).count(1, 0);
  }
  const auto totals = metrics.totals();
  EXPECT_EQ(totals.calls.size(), Metrics::kMaxGroups + 1);
  const auto others = std::find_if(totals.calls.begin(), totals.calls.end(),
                                   [](const auto& c) { return c.group == "(other groups)"; });
  ASSERT_NE(others, totals.calls.end());
  EXPECT_EQ(others->calls, Metrics::kMaxGroups);
}

TEST(Metrics, QuantilesAreInterpolated) {
  Metrics::CallTotals calls;
  EXPECT_EQ(quantile(calls, 0.5), 0);
  calls.byDuration[1] = 3;  // 1 to 2 us
  calls.byDuration[3] = 1;  // 4 to 8 us
  calls.calls = 4;
  EXPECT_NEAR(quantile(calls, 0.5), 1.667e-6, 1e-8);
  EXPECT_NEAR(quantile(calls, 1), 8e-6, 1e-12);
  calls.byDuration[engine::observe::durations::kLimits] = 96;  // longer than the last limit
  calls.calls = 100;
  EXPECT_NEAR(quantile(calls, 0.5), 67.108864, 1e-9);
}

TEST(Metrics, TextsQuoteNames) {
  Metrics metrics;
  metrics.group("a\"b\\c\nd")->countError("broadcast", "PeerLostError");
  const engine::observe::MetricsOrigin origin{.host = "h", .pid = 7, .rank = -1, .writtenAt = 1.5};
  const std::string quoted = R"(group="a\"b\\c d")";
  EXPECT_THAT(prometheusText(origin, metrics.totals()),
              HasSubstr("smddp_errors_total{rank=\"\",pid=\"7\"," + quoted +
                        ",collective=\"broadcast\",kind=\"PeerLostError\"} 1\n"));
  EXPECT_THAT(jsonLine(origin, 1, {}, metrics.totals()),
              HasSubstr(R"("errors":[{"group":"a\"b\\c d","collective":"broadcast",)"));
}

TEST(Metrics, EverySampleBelongsToAFamilyThatIsDescribed) {
  Metrics metrics;
  metrics.group("g")->algorithm("allreduce", "ring").of(100).count(1500, 100);
  metrics.group("g")->countError("broadcast", "PeerLostError");
  metrics.group("g")->countStall();
  std::istringstream text(prometheusText({.host = "h", .pid = 7, .rank = 0}, metrics.totals()));
  std::string family;
  for (std::string line; std::getline(text, line);) {
    std::istringstream words(line);
    std::string sign, word;
    words >> sign >> word;
    if (line.starts_with("# TYPE ")) {
      words >> family;
    } else if (!line.starts_with('#')) {
      EXPECT_FALSE(family.empty());
      EXPECT_TRUE(line.starts_with(family)) << line;
    }
  }
}

TEST(Metrics, ALineHasWhatIsNewSinceTheLast) {
  Metrics metrics;
  auto& calls = metrics.group("g")->algorithm("allreduce", "ring").of(100);
  calls.count(1500, 100);
  const engine::observe::MetricsOrigin origin{.host = "h", .pid = 7, .rank = 3, .writtenAt = 1.5};
  const auto first = metrics.totals();
  EXPECT_THAT(jsonLine(origin, 1, {}, first), HasSubstr(R"("calls":1,"bytes":100,)"));
  EXPECT_THAT(jsonLine(origin, 1, first, metrics.totals()), HasSubstr(R"("calls":[])"));
  calls.count(1500, 50);
  metrics.group("g")->countStall();
  const std::string line = jsonLine(origin, 1, first, metrics.totals());
  EXPECT_THAT(line, HasSubstr(R"("calls":1,"bytes":50,)"));
  EXPECT_THAT(line, HasSubstr(R"("stalls":[{"group":"g","count":1}])"));
  EXPECT_THAT(line, HasSubstr(R"("rank":3)"));
}

// What one rank has counted for each collective and algorithm.
std::map<std::string, Metrics::CallTotals> byName(const Metrics& metrics) {
  std::map<std::string, Metrics::CallTotals> named;
  for (const auto& calls : metrics.totals().calls) {
    named[calls.collective + "/" + calls.algorithm + calls.size] = calls;
  }
  return named;
}

class MetricsOfRanks : public testing::Test {
 protected:
  void run(const std::vector<int>& layout, const std::function<void(RankContext&)>& body) {
    size_t size = 0;
    for (const int ranks : layout) size += static_cast<size_t>(ranks);
    for (size_t rank = 0; rank < size; ++rank) metrics_.push_back(std::make_shared<Metrics>());
    runRanks(layout, body, [&](Rank rank, engine::Engine::Options& options) {
      options.process.metrics = metrics_[static_cast<size_t>(rank)];
    });
  }
  const Metrics& of(Rank rank) const { return *metrics_[static_cast<size_t>(rank)]; }

 private:
  std::vector<std::shared_ptr<Metrics>> metrics_;
};

TEST_F(MetricsOfRanks, OneNodeAgreesWithStatistics) {
  run({2}, [&](RankContext& rank) {
    std::vector<float> small(10, 1), large(1 << 20, 1);
    for (int i = 0; i < 20; ++i) rank.run(allReduce(bytesOf(small)));
    for (int i = 0; i < 3; ++i) rank.run(allReduce(bytesOf(large)));
    rank.run(barrier());
    uint64_t calls = 0, bytes = 0;
    for (const auto& [name, use] : rank.group->plans.statistics()) {
      calls += use.calls;
      bytes += use.bytes;
    }
    uint64_t counted = 0, countedBytes = 0;
    for (const auto& totals : of(rank.rank).totals().calls) {
      EXPECT_EQ(totals.group, "test");
      EXPECT_GT(totals.duration, 0);
      EXPECT_EQ(totals.wireBytes, 0u);
      EXPECT_EQ(totals.waited.network, 0);
      EXPECT_LE(totals.waited.node, totals.duration);
      counted += totals.calls;
      countedBytes += totals.bytes;
    }
    EXPECT_EQ(counted, calls);
    EXPECT_EQ(countedBytes, bytes);
    EXPECT_EQ(byName(of(rank.rank)).at("allreduce/one_shot<=1KiB").calls, 20u);
  });
}

TEST_F(MetricsOfRanks, TheRankThatComesLastDoesNotWait) {
  std::latch submitted(1);
  run({2}, [&](RankContext& rank) {
    std::vector<float> data(100'000, 1);
    rank.run(barrier());
    auto request = allReduce(bytesOf(data));
    request.timeout = kTimeout;
    if (rank.rank == 1) {
      submitted.wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    const auto completion = rank.engine.submit(*rank.group, std::move(request));
    if (rank.rank == 0) submitted.count_down();
    rank.engine.wait(*rank.group, *completion);
    const auto waited = byName(of(rank.rank)).at("allreduce/two_phase<=1MiB").waited.node;
    // Rank 0 has waited since it was submitted, more or less.
    if (rank.rank == 0) {
      EXPECT_GT(waited, 50'000'000);
    }
  });
  EXPECT_LT(byName(of(1)).at("allreduce/two_phase<=1MiB").waited.node,
            byName(of(0)).at("allreduce/two_phase<=1MiB").waited.node);
}

TEST_F(MetricsOfRanks, TwoNodesCountWhatTheySend) {
  run({1, 1}, [&](RankContext& rank) {
    std::vector<float> data(1 << 20, 1);
    for (int i = 0; i < 3; ++i) rank.run(allReduce(bytesOf(data)));
    const auto calls = byName(of(rank.rank)).at("allreduce/direct<=32MiB");
    EXPECT_EQ(calls.calls, 3u);
    EXPECT_EQ(calls.wireBytes, rank.group->plans.statistics().at("allreduce/direct").fabricBytes);
    EXPECT_EQ(calls.waited.node, 0);
    EXPECT_GT(calls.waited.network, 0);
    engine::calls::Message message;
    message.send = rank.rank == 0;
    message.peer = 1 - rank.rank;
    message.buffer = {bytesOf(data)};
    message.timeout = kTimeout;
    const auto completion = rank.engine.submit(*rank.group, std::move(message));
    rank.engine.wait(*rank.group, *completion);
    const auto sent =
        byName(of(rank.rank)).at(rank.rank == 0 ? "send/message<=32MiB" : "recv/message<=32MiB");
    EXPECT_EQ(sent.calls, 1u);
    EXPECT_EQ(sent.bytes, data.size() * sizeof(float));
    EXPECT_EQ(sent.wireBytes, rank.rank == 0 ? sent.bytes : 0);
  });
}

TEST_F(MetricsOfRanks, ErrorsAreCounted) {
  run({2}, [&](RankContext& rank) {
    std::vector<float> data(rank.rank == 0 ? 100 : 101, 1);
    EXPECT_THROW(rank.run(allReduce(bytesOf(data))), Error);
    const auto errors = of(rank.rank).totals().errors;
    ASSERT_EQ(errors.size(), 1u);
    EXPECT_EQ(errors[0].collective, "allreduce");
    EXPECT_EQ(errors[0].kind, "CollectiveMismatchError");
    EXPECT_EQ(errors[0].count, 1u);
    EXPECT_TRUE(of(rank.rank).totals().calls.empty());
  });
}

}  // namespace
}  // namespace smddp::test
