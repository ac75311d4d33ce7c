// Send and recv, within a node and between nodes: matching by source and tag, order, sizes.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "engine/calls.h"
#include "engine/operations/matcher.h"
#include "support/ranks.h"

namespace smddp::test {
namespace {

using engine::calls::CompletionPtr;
using engine::calls::kAnySource;
using Data = std::vector<std::byte>;

CompletionPtr begin(RankContext& rank, bool send, Rank peer, Bytes buffer, int tag,
                    bool buffered = false) {
  engine::calls::Message message;
  message.send = send;
  message.peer = peer;
  message.tag = tag;
  message.buffer = {buffer};
  message.timeout = kTimeout;
  message.buffered = buffered;
  return rank.engine.submit(*rank.group, std::move(message));
}

CompletionPtr send(RankContext& rank, Rank to, Data& data, int tag = 0) {
  return begin(rank, true, to, data, tag);
}
CompletionPtr receive(RankContext& rank, Rank from, Data& data, int tag = 0) {
  return begin(rank, false, from, data, tag);
}
void finish(RankContext& rank, const CompletionPtr& completion) {
  rank.engine.wait(*rank.group, *completion);
  if (completion->error()) throw *completion->error();
}

// The contents differ for any two seeds or lengths.
Data make(size_t bytes, int seed) {
  Data data(bytes);
  uint64_t state = static_cast<uint64_t>(seed) * 2654435761u + bytes;
  for (auto& b : data) b = static_cast<std::byte>((state = state * 6364136223846793005u + 1) >> 56);
  return data;
}

class MatcherTest : public testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Layouts, MatcherTest,
                         testing::Values(std::vector{1}, std::vector{3}, std::vector{2, 1},
                                         std::vector{1, 1, 1}));

TEST_P(MatcherTest, RingExchangeOfAllSizes) {
  runRanks(GetParam(), [](RankContext& rank) {
    const Rank next = (rank.rank + 1) % rank.size;
    const Rank previous = (rank.rank + rank.size - 1) % rank.size;
    for (const size_t bytes : {0, 1, 4099, 65'536, 65'537, 5'000'003}) {
      Data out = make(bytes, rank.rank), in(bytes);
      const auto sent = send(rank, next, out);
      const auto received = receive(rank, previous, in);
      finish(rank, received);
      finish(rank, sent);
      EXPECT_EQ(received->source(), previous);
      EXPECT_TRUE(in == make(bytes, previous)) << bytes << " bytes to rank " << rank.rank;
    }
  });
}

// Rank 0 receives in another order than the others send.
TEST_P(MatcherTest, TagsSelectAndOneTagKeepsItsOrder) {
  runRanks(GetParam(), [](RankContext& rank) {
    constexpr std::array kTags{5, 3, 5, 9, 3};
    constexpr std::array<size_t, 5> kReceived{3, 1, 0, 4, 2};  // indices into kTags
    std::vector<Data> out;
    std::vector<CompletionPtr> completions;
    for (size_t i = 0; i < kTags.size(); ++i)
      out.push_back(make(1000 + 100'000 * i, rank.rank + 10 * static_cast<int>(i)));
    for (size_t i = 0; i < kTags.size(); ++i)
      completions.push_back(send(rank, 0, out[i], kTags[i]));
    for (Rank from = 0; rank.rank == 0 && from < rank.size; ++from) {
      for (const size_t i : kReceived) {
        Data in(1000 + 100'000 * i);
        finish(rank, receive(rank, from, in, kTags[i]));
        EXPECT_TRUE(in == make(in.size(), from + 10 * static_cast<int>(i)))
            << "from " << from << ", message " << i;
      }
    }
    for (const auto& completion : completions) finish(rank, completion);
  });
}

// Buffered sends end before the messages are received. Long ones are not buffered. The order within a tag holds for
// both kinds.
TEST_P(MatcherTest, BufferedMessagesEndBeforeTheyAreReceived) {
  runRanks(GetParam(), [](RankContext& rank) {
    const Rank next = (rank.rank + 1) % rank.size;
    const Rank previous = (rank.rank + rank.size - 1) % rank.size;
    constexpr auto kLongest = static_cast<size_t>(engine::operations::Matcher::kMaxBuffered);
    std::vector<size_t> sizes{0, 1, kLongest, kLongest + 1, 7, 300'000, 64};
    // More messages than any transport has room for.
    for (size_t i = 0; i < 500; ++i) sizes.push_back(kLongest - i);
    std::vector<Data> out;
    std::vector<CompletionPtr> sent;
    for (const size_t bytes : sizes) out.push_back(make(bytes, rank.rank));
    for (Data& data : out) sent.push_back(begin(rank, true, next, data, 5, /*buffered=*/true));
    if (rank.size > 1) {
      for (const size_t i : {0, 1, 2, 4}) finish(rank, sent[i]);
      EXPECT_FALSE(sent[3]->done()) << "nobody can have received it";
    }
    rank.run(barrier());
    for (const size_t bytes : sizes) {
      Data in(bytes);
      const auto received = receive(rank, previous, in, 5);
      finish(rank, received);
      EXPECT_EQ(received->source(), previous);
      EXPECT_TRUE(in == make(bytes, previous)) << bytes << " bytes to rank " << rank.rank;
    }
    for (const auto& completion : sent) finish(rank, completion);
  });
}

TEST_P(MatcherTest, ReceivesThatNobodyAnsweredCanBeTakenBack) {
  runRanks(GetParam(), [](RankContext& rank) {
    if (rank.size == 1) return;
    const Rank next = (rank.rank + 1) % rank.size;
    const Rank previous = (rank.rank + rank.size - 1) % rank.size;
    Data never(100), early(100), late(100), out = make(100, rank.rank);
    const auto forgotten = receive(rank, previous, never);
    EXPECT_TRUE(rank.engine.withdraw(*rank.group, {forgotten}).empty());
    rank.run(barrier());
    const auto kept = receive(rank, previous, early);
    finish(rank, begin(rank, true, next, out, 0, /*buffered=*/true));
    finish(rank, kept);
    EXPECT_EQ(rank.engine.withdraw(*rank.group, {kept, forgotten}).size(), 2u);
    // The next message goes to the next receive, not to the one that was cancelled.
    finish(rank, begin(rank, true, next, out, 0, /*buffered=*/true));
    finish(rank, receive(rank, previous, late));
    EXPECT_TRUE(early == make(100, previous));
    EXPECT_TRUE(late == make(100, previous));
    EXPECT_TRUE(never == Data(100));
    EXPECT_FALSE(forgotten->done());
  });
}

// A wait for any of several returns one that has ended, or is woken.
TEST_P(MatcherTest, WaitsForAnyOfSeveral) {
  runRanks(GetParam(), [](RankContext& rank) {
    if (rank.size == 1) return;
    const Rank next = (rank.rank + 1) % rank.size;
    const Rank previous = (rank.rank + rank.size - 1) % rank.size;
    Data one(10), two(10), out = make(10, rank.rank);
    const std::vector<CompletionPtr> both{receive(rank, previous, one, 1),
                                          receive(rank, previous, two, 2)};
    std::atomic<bool> enough{false};
    std::thread waker([&] {
      enough.store(true);
      rank.engine.progress().wakeWaiters();
    });
    rank.engine.waitForAny(*rank.group, both, enough, 0);
    waker.join();
    EXPECT_TRUE(!both[0]->done() && !both[1]->done());
    rank.run(barrier());
    const auto sent = begin(rank, true, next, out, 2);
    enough.store(false);
    rank.engine.waitForAny(*rank.group, both, enough, /*yieldFor=*/200'000);
    EXPECT_TRUE(both[1]->done());
    EXPECT_TRUE(rank.engine.withdraw(*rank.group, {both[0]}).empty());
    finish(rank, sent);
  });
}

// The number of times that progress threads of this process have begun to run.
int64_t progressRuns() {
  int64_t runs = 0;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name, line;
    std::ifstream(thread.path() / "comm") >> name;
    if (name != "smddp-progress") continue;
    const std::string key = "voluntary_ctxt_switches:";
    for (std::ifstream status(thread.path() / "status"); std::getline(status, line);) {
      if (line.starts_with(key)) runs += std::stoll(line.substr(key.size()));
    }
  }
  return runs;
}

// If the progress thread ran together with a waiting thread, the two would take turns on one core for every message.
TEST_P(MatcherTest, ShortMessagesBetweenThoseWhoWaitWakeNobodyElse) {
  constexpr int kRounds = 500;
  runRanks(GetParam(), [](RankContext& rank) {
    if (rank.size == 1) return;
    const Rank next = (rank.rank + 1) % rank.size;
    const Rank previous = (rank.rank + rank.size - 1) % rank.size;
    Data in(100), out = make(100, rank.rank);
    const std::atomic<bool> enough{false};
    rank.run(barrier());
    const int64_t before = progressRuns();
    for (int round = 0; round < kRounds; ++round) {
      const engine::progress::WaitScope waiting(rank.engine.progress());
      finish(rank, begin(rank, true, next, out, 0, /*buffered=*/true));
      rank.engine.waitForAny(*rank.group, {receive(rank, previous, in)}, enough,
                             /*yieldFor=*/200'000);
      EXPECT_TRUE(in == make(100, previous));
    }
    // A few runs are normal, because all progress threads check several times a second.
    EXPECT_LT(progressRuns() - before, kRounds / 2);
    rank.run(barrier());
  });
}

// If callers always come back at once, the progress thread stays asleep. It must still do the work of a caller that
// does not come back.
TEST_P(MatcherTest, WhatNobodyComesBackForIsDone) {
  constexpr int kTimes = 3;
  constexpr int kQuickRounds = 20;
  runRanks(GetParam(), [](RankContext& rank) {
    const Rank next = (rank.rank + 1) % rank.size;
    const Rank previous = (rank.rank + rank.size - 1) % rank.size;
    for (int time = 0; time < kTimes; ++time) {
      Data in(100), out = make(100, rank.rank);
      for (int round = 0; round < kQuickRounds; ++round) {
        const auto sent = send(rank, next, out);
        finish(rank, receive(rank, previous, in));
        finish(rank, sent);
      }
      Data longIn(1'000'003), longOut = make(longIn.size(), rank.rank);
      const auto received = receive(rank, previous, longIn);
      const auto sent = send(rank, next, longOut);
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kTimeout);
      while (!(received->done() && sent->done()) && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      ASSERT_TRUE(received->done() && sent->done());
      EXPECT_TRUE(longIn == make(longIn.size(), previous));
    }
  });
}

// No thread takes up what is left, so it stays as it is.
TEST(WaitScope, CountsAsAWaitUntilItsEnd) {
  runRanks(
      {1},
      [](RankContext& rank) {
        Data never(10);
        {
          const engine::progress::WaitScope waiting(rank.engine.progress());
          receive(rank, kAnySource, never);
          EXPECT_FALSE(rank.engine.progress().hasUnattendedWork());
        }
        EXPECT_TRUE(rank.engine.progress().hasUnattendedWork());
      },
      [](Rank, engine::Engine::Options& options) { options.progressThread = false; });
}

TEST_P(MatcherTest, AnySourceSaysWhoItWas) {
  runRanks(GetParam(), [](RankContext& rank) {
    constexpr int kRounds = 5;
    if (rank.rank > 0) {
      for (int round = 0; round < kRounds; ++round) {
        Data out = make(3000, rank.rank + 100 * round);
        finish(rank, send(rank, 0, out, 7));
      }
      return;
    }
    std::vector<int> rounds(static_cast<size_t>(rank.size));
    for (int i = 0; i < kRounds * (rank.size - 1); ++i) {
      Data in(3000);
      const auto received = receive(rank, kAnySource, in, 7);
      finish(rank, received);
      const Rank from = received->source();
      ASSERT_TRUE(from > 0 && from < rank.size) << from;
      EXPECT_TRUE(in == make(3000, from + 100 * rounds[static_cast<size_t>(from)]++));
    }
  });
}

TEST_P(MatcherTest, ToSelfInEitherOrder) {
  runRanks(GetParam(), [](RankContext& rank) {
    for (const bool sendFirst : {true, false}) {
      for (const Rank source : {rank.rank, kAnySource}) {
        Data out = make(70'001, rank.rank), in(out.size());
        CompletionPtr sent, received;
        if (sendFirst) sent = send(rank, rank.rank, out, 1);
        received = receive(rank, source, in, 1);
        if (!sendFirst) sent = send(rank, rank.rank, out, 1);
        finish(rank, received);
        finish(rank, sent);
        EXPECT_EQ(received->source(), rank.rank);
        EXPECT_TRUE(in == out);
      }
    }
  });
}

// Messages end where a piece of the sender's buffer ends. The receiver's pieces have other lengths.
TEST_P(MatcherTest, BuffersInPieces) {
  runRanks(GetParam(), [](RankContext& rank) {
    const Rank next = (rank.rank + 1) % rank.size;
    const Rank previous = (rank.rank + rank.size - 1) % rank.size;
    constexpr size_t kBytes = 400'000;
    const auto split = [](Data& data, const std::vector<size_t>& ends) {
      engine::calls::Pieces pieces;
      size_t begin = 0;
      for (const size_t end : ends) {
        pieces.emplace_back(std::span(data).subspan(begin, end - begin));
        begin = end;
      }
      pieces.emplace_back(std::span(data).subspan(begin));
      return pieces;
    };
    const std::vector<std::vector<size_t>> cuts{{}, {1}, {65'536, 131'072}, {100'000, 100'001}};
    int tag = 0;
    for (const auto& sent : cuts) {
      for (const auto& received : cuts) {
        Data out = make(kBytes, rank.rank + tag), in(kBytes);
        std::vector<CompletionPtr> completions;
        for (const bool isSend : {false, true}) {
          engine::calls::Message message;
          message.send = isSend;
          message.peer = isSend ? next : previous;
          message.tag = tag;
          message.buffer = isSend ? split(out, sent) : split(in, received);
          message.timeout = kTimeout;
          completions.push_back(rank.engine.submit(*rank.group, std::move(message)));
        }
        for (const auto& completion : completions) finish(rank, completion);
        EXPECT_TRUE(in == make(kBytes, previous + tag)) << "message " << tag;
        ++tag;
      }
    }
  });
}

// Receives are posted before, between and after the sends, while collectives run.
TEST_P(MatcherTest, ManyInFlightBesideCollectives) {
  runRanks(GetParam(), [](RankContext& rank) {
    const Rank peer = rank.size - 1 - rank.rank;
    constexpr int kMessages = 30;
    std::vector<Data> in, out;
    for (int i = 0; i < kMessages; ++i) {
      const auto bytes = static_cast<size_t>(i * i * 200);
      in.emplace_back(bytes);
      out.push_back(make(bytes, rank.rank + i));
    }
    std::vector<CompletionPtr> completions;
    for (size_t i = 0; i < kMessages; ++i) {
      if (i % 2 == 0) completions.push_back(receive(rank, peer, in[i], static_cast<int>(i)));
      completions.push_back(send(rank, peer, out[i], static_cast<int>(i)));
      if (i % 2 == 1) completions.push_back(receive(rank, peer, in[i], static_cast<int>(i)));
      if (i % 10 == 5) rank.run(barrier());
    }
    for (const auto& completion : completions) finish(rank, completion);
    for (int i = 0; i < kMessages; ++i) {
      const auto& got = in[static_cast<size_t>(i)];
      EXPECT_TRUE(got == make(got.size(), peer + i)) << i;
    }
  });
}

// A process without descriptors cannot connect to a rank that it has not talked to.
struct CannotSend final : engine::operations::Matcher::Host {
  void sendControl(Rank, transport::Bytes) override { raise(ErrorKind::Resource, "no socket"); }
  transport::SendChannel& sendChannel(Rank) override { std::abort(); }
  transport::ReceiveChannel& receiveChannel(Rank) override { std::abort(); }
  void onComplete(engine::operations::Transfer&) override {}
  bool backlogged(Rank) override { return false; }
};

TEST(Matcher, ASendThatThrowsStaysInItsCare) {
  Ownership ownership;
  ASSERT_TRUE(ownership.tryAcquire());
  CannotSend host;
  engine::operations::Matcher matcher(ownership, host, 1, 0);
  for (const bool buffered : {true, false}) {
    Data data = make(100, 1);
    engine::operations::Transfer transfer;
    transfer.message.send = true;
    transfer.message.peer = 1;
    transfer.message.buffer = {Bytes(data)};
    transfer.message.buffered = buffered;
    transfer.bytes = 100;
    EXPECT_THROW(matcher.submit(std::move(transfer)), Error);
  }
  // The group ends both when it breaks.
  int held = 0;
  matcher.forEach([&](engine::operations::Transfer&) { ++held; });
  EXPECT_EQ(held, 2);
  matcher.clear();
  ownership.letGo();
}

}  // namespace
}  // namespace smddp::test
