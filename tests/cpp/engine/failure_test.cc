// Failures while all processes are alive. Every rank must soon get an error that names the rank at fault and the
// reason, and the same error from then on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <latch>
#include <numeric>
#include <thread>

#include "common/interrupt.h"
#include "engine/calls.h"
#include "support/effort.h"
#include "support/ranks.h"
#include "support/watchdog.h"

namespace smddp::test {
namespace {

using engine::calls::CompletionPtr;
using testing::HasSubstr;

constexpr Nanoseconds kShort = kSlowdown * 1'000'000'000;
constexpr Nanoseconds kLong = 20'000'000'000;

CompletionPtr begin(engine::Engine& engine, engine::groups::Group& group,
                    engine::calls::Request request, Nanoseconds timeout) {
  request.timeout = timeout;
  return engine.submit(group, std::move(request));
}

// The error of the call, or of a barrier after it: a rank may finish its part before the failure is known.
std::optional<Error> errorOf(RankContext& rank, engine::groups::Group& group,
                             engine::calls::Request request, Nanoseconds timeout = kLong) {
  for (auto& next : {std::move(request), barrier()}) {
    const auto completion = begin(rank.engine, group, next, timeout);
    rank.engine.wait(group, *completion);
    if (completion->error()) return completion->error();
  }
  return std::nullopt;
}

class FailureTest : public testing::TestWithParam<std::vector<int>> {
 protected:
  static int numRanks() { return std::accumulate(GetParam().begin(), GetParam().end(), 0); }

 private:
  Watchdog watchdog_;
};
INSTANTIATE_TEST_SUITE_P(Layouts, FailureTest,
                         testing::Values(std::vector{3}, std::vector{2, 2}, std::vector{1, 1, 1}));

// The last rank makes this call, while the others call an allreduce of 1000 float32, or the call of `usual`.
struct Disagreement {
  const char* name;
  engine::calls::Request (*usual)(Bytes);
  engine::calls::Request (*odd)(Bytes);
  const char* usualText;
  const char* oddText;
};

engine::calls::Request usualReduce(Bytes data) { return allReduce(data.first(4000)); }
engine::calls::Request usualBroadcast(Bytes data) { return broadcast(data.first(4000), 0); }

const Disagreement kDisagreements[] = {
    {"type", usualReduce, [](Bytes data) { return allReduce(data.first(4000), DataType::int32); },
     "1000 float32", "1000 int32"},
    {"operation", usualReduce,
     [](Bytes data) { return allReduce(data.first(4000), DataType::float32, ReduceOp::MAX); },
     "with SUM", "with MAX"},
    {"count", usualReduce, [](Bytes data) { return allReduce(data.first(3996)); }, "1000 float32",
     "999 float32"},
    {"long count", usualReduce, [](Bytes data) { return allReduce(data); }, "1000 float32",
     "500000 float32"},
    {"collective", usualReduce, [](Bytes data) { return broadcast(data.first(4000), 0); },
     "allreduce", "broadcast"},
    {"barrier", usualReduce, [](Bytes) { return barrier(); }, "allreduce", "barrier"},
    {"root", usualBroadcast, [](Bytes data) { return broadcast(data.first(4000), 2); },
     "from rank 0", "from rank 2"},
};

TEST_P(FailureTest, DisagreementIsNamedOnEveryRank) {
  runRanks(GetParam(), [&](RankContext& rank) {
    for (const Disagreement& d : kDisagreements) {
      SCOPED_TRACE(fmt::format("{}, rank {}", d.name, rank.rank));
      const auto group = rank.engine.createGroup(
          rank.store, {std::string("differs in ") + d.name, rank.rank, rank.size}, kTimeout);
      Block data(2'000'000);
      // Open channels in all directions first, so that nothing waits for that later.
      for (Rank root = 0; root < rank.size; ++root) {
        const auto done = begin(rank.engine, *group, broadcast(data.bytes(), root), kTimeout);
        rank.engine.wait(*rank.group, *done);
        EXPECT_FALSE(done->error()) << done->error()->what();
      }
      const bool odd = rank.rank == rank.size - 1;
      const auto error = errorOf(rank, *group, (odd ? d.odd : d.usual)(data.bytes()));
      EXPECT_TRUE(error) << "no error";
      if (!error) continue;
      EXPECT_EQ(error->kind(), ErrorKind::Mismatch) << error->what();
      EXPECT_THAT(error->what(), HasSubstr(d.usualText));
      EXPECT_THAT(error->what(), HasSubstr(d.oddText));
    }
  });
}

TEST_P(FailureTest, MessageOfAnotherSizeThanReceived) {
  runRanks(GetParam(), [](RankContext& rank) {
    Block data(100);
    engine::calls::Message message;
    message.send = rank.rank == 0;
    message.peer = rank.rank == 0 ? 1 : 0;
    message.buffer = {data.bytes().first(rank.rank == 0 ? 100 : 99)};
    message.timeout = kLong;
    // The other ranks learn of it in a barrier.
    const auto completion = rank.rank < 2 ? rank.engine.submit(*rank.group, std::move(message))
                                          : begin(rank.engine, *rank.group, barrier(), kLong);
    rank.engine.wait(*rank.group, *completion);
    ASSERT_TRUE(completion->error());
    EXPECT_EQ(completion->error()->kind(), ErrorKind::Mismatch);
    EXPECT_THAT(completion->error()->what(), HasSubstr("100 bytes"));
    EXPECT_THAT(completion->error()->what(), HasSubstr("receives 99"));
  });
}

TEST_P(FailureTest, WhoeverDoesNotComeIsNamed) {
  const int size = numRanks();
  std::latch failed(size - 1);
  runRanks(GetParam(), [&](RankContext& rank) {
    const Rank absent = rank.size - 1;
    if (rank.rank == absent) return failed.wait();
    Block data(400'000);
    // This is long enough for inquiries between nodes.
    const auto error = errorOf(rank, *rank.group, allReduce(data.bytes()), 3 * kShort);
    failed.count_down();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), ErrorKind::Timeout) << error->what();
    EXPECT_THAT(error->what(), HasSubstr("allreduce of 100000 float32"));
    // Ranks that wait for a rank that itself waits for the absent one must name the absent one, too.
    EXPECT_THAT(error->what(), testing::ContainsRegex(fmt::format(
                                   "; rank {} \\(pid .*\\) has not made any call yet", absent)));
  });
}

// This also holds if everything that the rank needs has already arrived.
TEST_P(FailureTest, WhoeverComesAfterTheTimeOutGetsTheErrorToo) {
  const int size = numRanks();
  for (const size_t bytes : {64, 400'000}) {
    std::latch failed(size - 1);
    runRanks(GetParam(), [&](RankContext& rank) {
      const bool late = rank.rank == rank.size - 1;
      if (late) failed.wait();
      Block data(bytes);
      const auto call =
          begin(rank.engine, *rank.group, allReduce(data.bytes()), late ? kLong : kShort);
      rank.engine.wait(*rank.group, *call);
      if (!late) failed.count_down();
      ASSERT_TRUE(call->error()) << bytes;
      EXPECT_EQ(call->error()->kind(), ErrorKind::Timeout) << call->error()->what();
      EXPECT_THAT(call->error()->what(), HasSubstr("Timed out after"));
    });
  }
}

// wait() with a time-out that is shorter than the operation's, also for an operation that has not begun.
TEST_P(FailureTest, WhoeverWillNotWaitLongerEndsItAsADeadlineDoes) {
  const int size = numRanks();
  std::latch failed(size - 1);
  runRanks(GetParam(), [&](RankContext& rank) {
    if (rank.rank == rank.size - 1) return failed.wait();
    Block data(400'000);
    std::vector<CompletionPtr> calls;
    for (int i = 0; i < 6; ++i) {
      calls.push_back(begin(rank.engine, *rank.group, allReduce(data.bytes()), kLong));
    }
    const CompletionPtr& last = calls.back();
    if (rank.rank == 0 && !rank.engine.waitFor(*rank.group, *last, kShort)) {
      rank.engine.expire(*rank.group, *last, kShort);
    }
    for (const auto& call : calls) {
      rank.engine.wait(*rank.group, *call);
      EXPECT_TRUE(call->error());
      if (!call->error()) continue;
      EXPECT_EQ(call->error()->kind(), ErrorKind::Timeout) << call->error()->what();
      EXPECT_THAT(call->error()->what(),
                  testing::ContainsRegex(
                      fmt::format("Timed out after {}.0 s, rank 0 waits .* for rank", kSlowdown)));
    }
    // It has ended, so this has no effect.
    rank.engine.expire(*rank.group, *last, kShort);
    failed.count_down();
  });
}

// Calls before it have longer time-outs, and so has one after it.
TEST_P(FailureTest, ADeadlineHoldsForACallThatHasNotBegun) {
  const int size = numRanks();
  std::latch failed(size - 1);
  runRanks(GetParam(), [&](RankContext& rank) {
    if (rank.rank == rank.size - 1) return failed.wait();
    Block data(400'000);
    std::vector<CompletionPtr> calls;
    for (int i = 0; i < 8; ++i) {
      calls.push_back(
          begin(rank.engine, *rank.group, allReduce(data.bytes()), i == 6 ? kShort : kLong));
    }
    for (const auto& call : calls) {
      rank.engine.wait(*rank.group, *call);
      EXPECT_TRUE(call->error());
      if (!call->error()) continue;
      EXPECT_THAT(call->error()->what(),
                  HasSubstr(fmt::format("Timed out after {}.0 s", kSlowdown)));
    }
    failed.count_down();
  });
}

TEST_P(FailureTest, NobodySendsNobodyReceives) {
  runRanks(GetParam(), [](RankContext& rank) {
    Block data(100);
    engine::calls::Message message;
    message.send = rank.rank == 0;
    message.peer = 1 - rank.rank;
    message.tag = rank.rank;  // the tags never match
    message.buffer = {data.bytes()};
    message.timeout = kShort;
    if (rank.rank > 1) return;
    const auto completion = rank.engine.submit(*rank.group, std::move(message));
    rank.engine.wait(*rank.group, *completion);
    ASSERT_TRUE(completion->error());
    EXPECT_EQ(completion->error()->kind(), ErrorKind::Timeout);
    EXPECT_THAT(completion->error()->what(),
                testing::ContainsRegex("rank [01] waits to .* rank [01] with tag"));
  });
}

// Of messages that wait for the same rank, the one whose deadline comes first is named.
TEST_P(FailureTest, NobodySendsAnyOfThree) {
  runRanks(GetParam(), [](RankContext& rank) {
    if (rank.rank != 0) return;
    Block data(100);
    std::vector<CompletionPtr> receives;
    for (int tag = 0; tag < 3; ++tag) {
      engine::calls::Message message;
      message.peer = 1;
      message.tag = tag;
      message.buffer = {data.bytes()};
      message.timeout = tag == 1 ? kShort : kLong;
      receives.push_back(rank.engine.submit(*rank.group, std::move(message)));
    }
    for (const auto& receive : receives) {
      rank.engine.wait(*rank.group, *receive);
      ASSERT_TRUE(receive->error());
      EXPECT_THAT(receive->error()->what(),
                  HasSubstr("rank 0 waits to receive from rank 1 with tag 1 (and 2 more)"));
    }
  });
}

struct Signal {};
thread_local bool hasSignal = false;

void raiseSignal() {
  if (std::exchange(hasSignal, false)) throw Signal();
}

// A signal ends the wait of one rank, whose group then breaks for all.
TEST_P(FailureTest, ASignal) {
  setInterruptCheck(&raiseSignal);
  std::latch isOut(1);
  runRanks(GetParam(), [&](RankContext& rank) {
    if (rank.rank == 0) {
      Block data(4000);
      hasSignal = true;
      EXPECT_THROW(rank.run(allReduce(data.bytes())), Signal);
      isOut.count_down();
    } else if (rank.rank == 1) {
      isOut.wait();
    }
    Block data(4000);
    const auto error = errorOf(rank, *rank.group, allReduce(data.bytes()));
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), ErrorKind::Aborted);
    EXPECT_THAT(error->what(), HasSubstr("rank 0 (pid "));
    EXPECT_THAT(error->what(), HasSubstr("was interrupted by a signal"));
    // A rank whose call has failed may have the signal, too. That is then what it throws.
    const auto call = begin(rank.engine, *rank.group, barrier(), kLong);
    hasSignal = true;
    EXPECT_THROW(rank.engine.wait(*rank.group, *call), Signal);
  });
  setInterruptCheck(nullptr);
}

// abort() on one rank, from a thread that is in no call, ends the waits of all ranks. Later calls fail, too.
TEST_P(FailureTest, AbortFromAnotherThread) {
  const int size = numRanks();
  std::latch failed(size - 1);
  runRanks(GetParam(), [&](RankContext& rank) {
    Block data(400'000);
    const bool late = rank.rank == rank.size - 1;
    std::thread aborter;
    if (rank.rank == 0) {
      aborter = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        rank.engine.fail(*rank.group, Error(ErrorKind::Aborted, "the operator said stop"));
      });
    }
    if (late) failed.wait();
    const auto error = errorOf(rank, *rank.group, allReduce(data.bytes()));
    if (!late) failed.count_down();
    if (aborter.joinable()) aborter.join();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), ErrorKind::Aborted) << error->what();
    EXPECT_THAT(error->what(), HasSubstr("the operator said stop"));
  });
}

// A rank that has finished an operation may end the group at once. Ranks that still receive its data get their result,
// and all ranks get the error at the same call.
TEST_P(FailureTest, OperationsBeforeTheBreakRunOn) {
  runRanks(GetParam(), [&](RankContext& rank) {
    for (int round = 0; round < 20; ++round) {
      const auto group = rank.engine.createGroup(
          rank.store, {fmt::format("round {}", round), rank.rank, rank.size}, kTimeout);
      Block data(400'000);
      const int good = 1 + round % 3;
      std::vector<CompletionPtr> completions;
      for (int i = 0; i < good; ++i) {
        completions.push_back(begin(rank.engine, *group, allReduce(data.bytes()), kLong));
      }
      if (rank.rank == round % rank.size) {
        for (const auto& completion : completions) rank.engine.wait(*rank.group, *completion);
        rank.engine.fail(*group, Error(ErrorKind::Aborted, "enough"));
      }
      completions.push_back(begin(rank.engine, *group, allReduce(data.bytes()), kLong));
      for (int i = 0; i <= good; ++i) {
        rank.engine.wait(*rank.group, *completions[static_cast<size_t>(i)]);
        const auto& error = completions[static_cast<size_t>(i)]->error();
        ASSERT_EQ(error.has_value(), i == good)
            << (error ? error->what() : "no error") << " in " << i;
        if (!error) continue;
        EXPECT_EQ(error->kind(), ErrorKind::Aborted) << error->what();
      }
      rank.engine.destroyGroup(group);
    }
  });
}

TEST_P(FailureTest, DestroyWithOperationsInFlight) {
  runRanks(GetParam(), [&](RankContext& rank) {
    Block data(400'000), more(100);
    const bool leaves = rank.rank == rank.size - 1;
    const auto first = begin(rank.engine, *rank.group, allReduce(data.bytes()), kLong);
    rank.engine.wait(*rank.group, *first);
    EXPECT_FALSE(first->error()) << first->error()->what();
    std::vector<CompletionPtr> completions;
    if (leaves) completions.push_back(begin(rank.engine, *rank.group, barrier(), kLong));
    if (leaves) rank.engine.destroyGroup(rank.group);
    if (!leaves)
      completions.push_back(begin(rank.engine, *rank.group, allReduce(more.bytes()), kLong));
    for (const auto& completion : completions) {
      rank.engine.wait(*rank.group, *completion);
      ASSERT_TRUE(completion->error());
      // Either it left, or the others first saw that the calls differ.
      EXPECT_TRUE(completion->error()->kind() == ErrorKind::Aborted ||
                  completion->error()->kind() == ErrorKind::Mismatch)
          << completion->error()->what();
    }
  });
}

// An owner runs actions for other threads. One that throws does not say which group it is about.
TEST_P(FailureTest, AnActionThatThrowsBreaksWhatIsInFlight) {
  const int size = numRanks();
  std::latch failed(size);
  runRanks(GetParam(), [&](RankContext& rank) {
    const auto idle = rank.engine.createGroup(rank.store, {"idle", rank.rank, rank.size}, kTimeout);
    Block data(400'000);
    CompletionPtr call;
    if (rank.rank == 0) {
      call = begin(rank.engine, *rank.group, allReduce(data.bytes()), kLong);
      rank.engine.progress().post([] { throw std::runtime_error("made up"); });
      rank.engine.wait(*rank.group, *call);
    }
    failed.arrive_and_wait();
    if (!call) call = begin(rank.engine, *rank.group, allReduce(data.bytes()), kLong);
    rank.engine.wait(*rank.group, *call);
    ASSERT_TRUE(call->error());
    EXPECT_EQ(call->error()->kind(), ErrorKind::Internal);
    EXPECT_THAT(call->error()->what(), HasSubstr("rank 0"));
    EXPECT_THAT(call->error()->what(), HasSubstr("made up"));
    const auto done = begin(rank.engine, *idle, allReduce(data.bytes()), kLong);
    rank.engine.wait(*idle, *done);
    EXPECT_FALSE(done->error()) << done->error()->what();
  });
}

// Rank 2 takes rank 0 for lost, and ends the group. But rank 0 is alive, and its mates see that.
TEST(Failure, WhoWasGivenUpAndItsMatesHearWhoDidThat) {
  const Watchdog watchdog;
  std::latch heard(2);
  runRanks({3}, [&](RankContext& rank) {
    if (rank.rank == 2) {
      rank.engine.progress().call([&] {
        rank.group->team.publishBreak(
            {1, Error(ErrorKind::PeerLost, "made up"), /*lost=*/0, /*noticedBy=*/2});
      });
      return heard.wait();
    }
    const auto error = errorOf(rank, *rank.group, barrier());
    heard.count_down();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), ErrorKind::PeerLost);
    EXPECT_THAT(error->what(), testing::ContainsRegex("rank 2 \\(pid .*\\) has given up "));
    EXPECT_THAT(error->what(),
                HasSubstr(rank.rank == 0 ? "this rank, which is alive" : "rank 0 ("));
    EXPECT_THAT(error->what(), HasSubstr("ended the group: made up"));
  });
}

// A store that fails in the way that a test wants.
class FailingStore final : public bootstrap::Store {
 public:
  explicit FailingStore(ErrorKind kind) : kind_(kind) {}
  void set(const std::string&, const Value&) override { fail(); }
  Value get(const std::string&, Nanoseconds) override { fail(); }
  int64_t add(const std::string&, int64_t) override { fail(); }
  bool contains(const std::string&) override { fail(); }

 private:
  [[noreturn]] void fail() const { throw Error(kind_, "made up"); }
  const ErrorKind kind_;
};

// Rank 1 may leave because of what has failed. Rank 0 knows then why.
TEST(Failure, OtherGroupsHearOfAFailure) {
  const Watchdog watchdog;
  struct Case {
    const char* what;
    bool isTold;
    std::function<void(RankContext&, const std::shared_ptr<engine::groups::Group>& other)> failure;
  };
  const auto failsToMake = [](ErrorKind kind) {
    return [kind](RankContext& rank, const std::shared_ptr<engine::groups::Group>&) {
      FailingStore store(kind);
      EXPECT_THROW(rank.engine.createGroup(store, {"never", rank.rank, rank.size}, kTimeout),
                   Error);
    };
  };
  const Case cases[] = {
      {"an error", true,
       [](RankContext& rank, const auto& other) {
         rank.engine.fail(*other, Error(ErrorKind::Transport, "made up"));
       }},
      {"an abort", true,
       [](RankContext& rank, const auto& other) {
         rank.engine.fail(*other, Error(ErrorKind::Aborted, "made up"));
       }},
      {"a group that is left with calls in flight", false,
       [](RankContext& rank, const auto& other) {
         begin(rank.engine, *other, barrier(), kLong);
         rank.engine.destroyGroup(other);
       }},
      {"a rank that is lost while a group is made", true, failsToMake(ErrorKind::PeerLost)},
      {"a group that could not be made", false, failsToMake(ErrorKind::Timeout)},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.what);
    std::latch failed(2), looked(2);
    runRanks({2}, [&](RankContext& rank) {
      const auto other =
          rank.engine.createGroup(rank.store, {"other", rank.rank, rank.size}, kTimeout);
      if (rank.rank == 1) each.failure(rank, other);
      failed.arrive_and_wait();
      std::optional<engine::team::Trouble> trouble;
      rank.engine.progress().call([&] { trouble = rank.group->team.troubleOf(1); });
      EXPECT_EQ(trouble.has_value(), each.isTold);
      if (trouble) {
        EXPECT_THAT(trouble->text, HasSubstr("made up"));
      }
      looked.arrive_and_wait();
    });
  }
}

// The process may go on for long without another call of the engine.
TEST_P(FailureTest, MemoryOfAFailedCallIsFreedAfterTheGroupHasEnded) {
  const int size = numRanks();
  std::latch failed(size), freed(size);
  runRanks(GetParam(), [&](RankContext& rank) {
    auto data = std::make_shared<Block>(400'000);
    const std::weak_ptr<Block> seen = data;
    auto request = allReduce(data->bytes());
    request.keepAlive = std::move(data);
    if (rank.rank == 0) {
      rank.engine.fail(*rank.group, Error(ErrorKind::Aborted, "enough"));
    }
    const auto call = begin(rank.engine, *rank.group, std::move(request), kLong);
    rank.engine.wait(*rank.group, *call);
    EXPECT_TRUE(call->error());
    failed.arrive_and_wait();
    rank.engine.destroyGroup(rank.group);
    rank.group.reset();
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!seen.expired() && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_TRUE(seen.expired());
    freed.arrive_and_wait();
  });
}

// Announced, under way, or without an answer.
TEST_P(FailureTest, NoMessageIsLeftAfterABreak) {
  runRanks(GetParam(), [](RankContext& rank) {
    const Rank next = (rank.rank + 1) % rank.size;
    const Rank previous = (rank.rank + rank.size - 1) % rank.size;
    Block out(longCount(16 << 20)), in(longCount(16 << 20));
    std::vector<CompletionPtr> completions;
    const auto submit = [&](bool isSend, int tag) {
      engine::calls::Message message;
      message.send = isSend;
      message.peer = isSend ? next : previous;
      message.tag = tag;
      message.buffer = {isSend ? out.bytes() : in.bytes()};
      message.timeout = kLong;
      completions.push_back(rank.engine.submit(*rank.group, std::move(message)));
    };
    submit(false, 1);
    submit(true, 1);
    submit(true, 2);
    submit(false, 3);
    if (rank.rank == 0) rank.engine.fail(*rank.group, Error(ErrorKind::Aborted, "enough"));
    for (const auto& completion : completions) rank.engine.wait(*rank.group, *completion);
    EXPECT_TRUE(completions.back()->error());
    rank.engine.progress().call([&] { EXPECT_TRUE(rank.group->messages.idle()); });
  });
}

TEST_P(FailureTest, NothingWorksAfterDestroyOrShutdown) {
  runRanks(GetParam(), [](RankContext& rank) {
    Block data(100);
    const auto other =
        rank.engine.createGroup(rank.store, {"other", rank.rank, rank.size}, kTimeout);
    rank.run(barrier());
    rank.engine.destroyGroup(rank.group);
    rank.engine.destroyGroup(rank.group);
    const auto error = errorOf(rank, *rank.group, allReduce(data.bytes()));
    ASSERT_TRUE(error);
    EXPECT_THAT(error->what(), HasSubstr("destroyed"));
    // The other group is not affected.
    const auto done = begin(rank.engine, *other, allReduce(data.bytes()), kLong);
    rank.engine.wait(*rank.group, *done);
    EXPECT_FALSE(done->error()) << done->error()->what();
    rank.engine.shutdown();
    rank.engine.shutdown();
    EXPECT_THROW(rank.engine.submit(*other, barrier()), Error);
  });
}

TEST_P(FailureTest, TheFirstErrorIsTheAnswerToAllLaterCalls) {
  runRanks(GetParam(), [](RankContext& rank) {
    rank.engine.fail(*rank.group, Error(ErrorKind::Aborted, "first"));
    rank.engine.fail(*rank.group, Error(ErrorKind::Aborted, "second"));
    for (int i = 0; i < 3; ++i) {
      // Without a deadline: the call must not wait.
      const auto error =
          errorOf(rank, *rank.group, barrier(), std::numeric_limits<Nanoseconds>::max());
      ASSERT_TRUE(error);
      EXPECT_EQ(error->kind(), ErrorKind::Aborted);
      EXPECT_THAT(error->what(), HasSubstr("first"));
    }
  });
}

// The group is idle on all ranks, and the action may block for any time.
TEST_P(FailureTest, BreakActionsRunOnAThreadThatMayBlock) {
  runRanks(GetParam(), [](RankContext& rank) {
    const auto other =
        rank.engine.createGroup(rank.store, {"other", rank.rank, rank.size}, kTimeout);
    std::promise<std::pair<std::string, std::thread::id>> told;
    std::promise<void> noted, released;
    rank.engine.onBreak(*rank.group, [&](const Error& error) {
      told.set_value({error.what(), std::this_thread::get_id()});
      released.get_future().wait();
      noted.set_value();
    });
    rank.engine.watchMembers(*rank.group);
    if (rank.rank == 1) rank.engine.fail(*rank.group, Error(ErrorKind::Transport, "made up"));
    const auto [text, thread] = told.get_future().get();
    EXPECT_THAT(text, HasSubstr("made up"));
    EXPECT_NE(thread, std::this_thread::get_id());
    // Meanwhile the engine makes progress, also for threads that do not run it.
    const auto done = begin(rank.engine, *other, barrier(), kLong);
    std::promise<void> ended;
    done->then([&] { ended.set_value(); });
    ended.get_future().wait();
    EXPECT_FALSE(done->error());
    released.set_value();
    noted.get_future().wait();
    const auto failure = rank.engine.failureOf(*rank.group);
    ASSERT_TRUE(failure);
    EXPECT_THAT(failure->what(), HasSubstr("made up"));
  });
}

TEST_P(FailureTest, BreakActionsRunForABreakBeforeThemButNotForLeaving) {
  runRanks(GetParam(), [](RankContext& rank) {
    const auto left = rank.engine.createGroup(rank.store, {"left", rank.rank, rank.size}, kTimeout);
    std::atomic<bool> heard{false};
    rank.engine.onBreak(*left, [&](const Error&) { heard = true; });
    rank.engine.destroyGroup(left);
    rank.engine.fail(*rank.group, Error(ErrorKind::Transport, "made up"));
    std::promise<std::thread::id> told;
    rank.engine.onBreak(*rank.group,
                        [&](const Error&) { told.set_value(std::this_thread::get_id()); });
    EXPECT_NE(told.get_future().get(), std::this_thread::get_id()) << "it may block";
    EXPECT_FALSE(heard);
  });
}

}  // namespace
}  // namespace smddp::test
