// When the log says that a call waits, by a clock that the test moves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "engine/calls.h"
#include "engine/observe/recent_durations.h"

namespace smddp::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr Nanoseconds kSecond = 1'000'000'000;

class MovedClock final : public Clock {
 public:
  Nanoseconds now() const override { return now_; }
  void move(Nanoseconds time) { now_ += time; }

 private:
  Nanoseconds now_ = kSecond;
};

// Two ranks of a node, whose engines run when the test says so.
class StallTest : public testing::Test {
 protected:
  StallTest() {
    std::vector<engine::groups::Place> places;
    engine::groups::Members members{{}, {"node0", "node0"}};
    for (Rank rank = 0; rank < 2; ++rank) {
      engine::Engine::Options options;
      options.progressThread = false;
      options.process.clock = clock_;
      options.process.settings.nodeId = "node0";
      options.process.slabBytes = size_t{1} << 30;
      options.process.metrics = metrics_;
      auto& player = players_[static_cast<size_t>(rank)];
      player.engine = std::make_unique<engine::Engine>(options);
      places.push_back(player.engine->reserve({"test", rank, 2}));
      members.introductions.push_back(places.back().introduction);
    }
    for (size_t rank = 0; rank < 2; ++rank)
      players_[rank].group = players_[rank].engine->join(places[rank], members);
  }
  ~StallTest() override {
    for (auto& player : players_) player.engine.reset();
  }

  engine::calls::CompletionPtr begin(size_t rank, std::vector<float>& data) {
    auto request = allReduce(bytesOf(data));
    request.timeout = 3600 * kSecond;
    return players_[rank].engine->submit(*players_[rank].group, std::move(request));
  }
  void turn() {
    for (int i = 0; i < 3; ++i) {
      for (auto& player : players_) player.engine->progress().runTurn();
    }
  }
  // A call for which rank 1 comes so much later. Returns what the log said until then.
  std::vector<std::string> callThatTakes(Nanoseconds time) {
    const auto first = begin(0, data_[0]);
    testing::internal::CaptureStderr();
    for (Nanoseconds waited = 0; waited < time; waited += kSecond / 10) {
      turn();
      clock_->move(kSecond / 10);
    }
    turn();
    const std::string said = testing::internal::GetCapturedStderr();
    const auto second = begin(1, data_[1]);
    for (int i = 0; i < 1000 && !(first->done() && second->done()); ++i) turn();
    EXPECT_TRUE(first->done() && second->done());
    std::vector<std::string> lines;
    for (size_t begin = 0; begin < said.size();) {
      const size_t end = said.find('\n', begin);
      lines.push_back(said.substr(begin, end - begin));
      begin = end + 1;
    }
    return lines;
  }
  uint64_t stalls() const { return metrics_->totals().stalls.at(0).count; }

 private:
  struct Player {
    std::unique_ptr<engine::Engine> engine;
    std::shared_ptr<engine::groups::Group> group;
  };
  const std::shared_ptr<MovedClock> clock_ = std::make_shared<MovedClock>();
  const std::shared_ptr<engine::observe::Metrics> metrics_ =
      std::make_shared<engine::observe::Metrics>();
  std::array<std::vector<float>, 2> data_{std::vector<float>(1000, 1), std::vector<float>(1000, 1)};
  std::array<Player, 2> players_;
};

TEST_F(StallTest, NineSecondsAreNotReported) {
  EXPECT_THAT(callThatTakes(9 * kSecond), testing::IsEmpty());
  EXPECT_EQ(stalls(), 0u);
}

TEST_F(StallTest, IsReportedOnceAfterTenSeconds) {
  const auto lines = callThatTakes(30 * kSecond);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0],
              AllOf(HasSubstr("allreduce of 1000 float32 (4000 B) with SUM #1 (group \"test\") of "
                              "rank 0 has waited for 10.0 s, since 2"),
                    HasSubstr("UTC: it waits at the arrival for rank 1; rank 1 (pid "),
                    HasSubstr("has not made any call yet")));
  EXPECT_EQ(stalls(), 1u);
}

TEST_F(StallTest, CallsThatTakeLongMayTakeTwentyTimesAsLong) {
  for (int i = 0; i < 5; ++i) EXPECT_THAT(callThatTakes(2 * kSecond), testing::IsEmpty());
  EXPECT_THAT(callThatTakes(39 * kSecond), testing::IsEmpty());
  const auto lines = callThatTakes(60 * kSecond);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0],
              AllOf(HasSubstr("has waited for 40."), HasSubstr("; such calls took 2 s:")));
}

TEST(RecentDurations, MedianOfTheLast) {
  engine::observe::RecentDurations recent;
  EXPECT_EQ(recent.median(), 0);
  recent.add(5);
  EXPECT_EQ(recent.median(), 5);
  recent.add(1);
  recent.add(3);
  EXPECT_EQ(recent.median(), 3);
  for (int i = 0; i < 5; ++i) recent.add(100);
  EXPECT_EQ(recent.median(), 100);
  for (int i = 0; i < 9; ++i) recent.add(7);
  EXPECT_EQ(recent.median(), 7);
}

}  // namespace
}  // namespace smddp::test
