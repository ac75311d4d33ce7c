// Ranks that make a group much later than others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <numeric>
#include <optional>
#include <thread>

#include "engine/calls.h"
#include "engine/team/blame.h"
#include "engine/team/membership.h"
#include "support/ranks.h"
#include "support/watchdog.h"

namespace smddp::test {
namespace {

using bootstrap::Introduction;
using engine::calls::CompletionPtr;
using testing::HasSubstr;

CompletionPtr begin(RankContext& rank, engine::groups::Group& group, bool send, Bytes data) {
  engine::calls::Message message;
  message.send = send;
  message.peer = 1 - rank.rank;
  message.buffer = {data};
  message.timeout = kTimeout;
  return rank.engine.submit(group, std::move(message));
}

void finish(RankContext& rank, engine::groups::Group& group, const CompletionPtr& completion) {
  rank.engine.wait(group, *completion);
  if (completion->error()) throw *completion->error();
}

class LateRank : public testing::TestWithParam<std::vector<int>> {
 protected:
  using Body = std::function<void(RankContext&, engine::groups::Group&)>;

  // Rank 0 makes a group and runs `ahead`. When all that it has sent there has arrived, rank 1 makes the group, too,
  // and both run `together`.
  void run(const Body& ahead, const Body& together) {
    const bool isOneNode = GetParam().size() == 1;
    const std::vector<std::string> nodes{"node0", isOneNode ? "node0" : "node1"};
    std::latch begun(2);
    introductions_.resize(2);
    runRanks(GetParam(), [&](RankContext& rank) {
      const auto place = rank.engine.reserve({"late", rank.rank, rank.size});
      introductions_[static_cast<size_t>(rank.rank)] = place.introduction;
      std::shared_ptr<engine::groups::Group> group;
      begun.arrive_and_wait();
      if (rank.rank == 0) {
        group = rank.engine.join(place, {introductions_, nodes});
        ahead(rank, *group);
      }
      // Control messages arrive in order, also those of different groups.
      Block byte(1);
      finish(rank, *rank.group, begin(rank, *rank.group, rank.rank == 0, byte.bytes()));
      if (rank.rank == 1) group = rank.engine.join(place, {introductions_, nodes});
      together(rank, *group);
    });
  }

  // Sends rank 1 more control messages of the group than it keeps.
  void flood(RankContext& rank, uint8_t kind) {
    engine::team::InquiryMessage head;
    head.header.kind = kind;
    head.group = engine::team::GroupEntry::decode(introductions_[0]).groupId;
    std::vector<std::byte> message(transport::kMaxControlBytes);
    std::memcpy(message.data(), &head, sizeof head);
    rank.engine.progress().call([&] {
      const auto& peer = rank.engine.process().meet(introductions_[1], GetParam().size() == 1);
      for (int i = 0; i < 65'000; ++i) peer.table->control(peer.id, message);
    });
  }

 private:
  std::vector<Introduction> introductions_;
  Watchdog watchdog_;
};
INSTANTIATE_TEST_SUITE_P(Layouts, LateRank, testing::Values(std::vector{2}, std::vector{1, 1}));

TEST_P(LateRank, ReceivesWhatWasSentBefore) {
  std::vector<int32_t> sent(5000);
  std::iota(sent.begin(), sent.end(), 0);
  std::vector<CompletionPtr> sends;
  const auto pieceOf = [](std::vector<int32_t>& values, size_t i) {
    return bytesOf(values).subspan(i * sizeof(int32_t), sizeof(int32_t));
  };
  run(
      [&](RankContext& rank, engine::groups::Group& group) {
        for (size_t i = 0; i < sent.size(); ++i)
          sends.push_back(begin(rank, group, true, pieceOf(sent, i)));
      },
      [&](RankContext& rank, engine::groups::Group& group) {
        if (rank.rank == 0) {
          for (const auto& send : sends) finish(rank, group, send);
          return;
        }
        std::vector<int32_t> received(sent.size());
        for (size_t i = 0; i < received.size(); ++i)
          finish(rank, group, begin(rank, group, false, pieceOf(received, i)));
        EXPECT_EQ(received, sent);
      });
}

TEST_P(LateRank, FailsTheGroupIfMoreWasSentThanItKeeps) {
  run([&](RankContext& rank, engine::groups::Group&) { flood(rank, engine::calls::kBuffered); },
      [](RankContext& rank, engine::groups::Group& group) {
        auto request = barrier();
        request.timeout = kTimeout;
        const auto completion = rank.engine.submit(group, std::move(request));
        rank.engine.wait(group, *completion);
        ASSERT_TRUE(completion->error());
        EXPECT_EQ(completion->error()->kind(), ErrorKind::Resource);
        EXPECT_THAT(completion->error()->what(), HasSubstr("before this rank had made the group"));
        if (rank.rank == 0) {
          EXPECT_THAT(completion->error()->what(), HasSubstr("rank 1 (pid"));
        }
      });
}

TEST_P(LateRank, KeepsNoQuestions) {
  Block data(4), received(4);
  CompletionPtr send;
  run(
      [&](RankContext& rank, engine::groups::Group& group) {
        flood(rank, engine::calls::kInquiry);
        send = begin(rank, group, true, data.bytes());
      },
      [&](RankContext& rank, engine::groups::Group& group) {
        finish(rank, group, rank.rank == 0 ? send : begin(rank, group, false, received.bytes()));
      });
}

TEST(GroupEntry, OfAnotherSizeIsRefused) {
  Introduction introduction;
  introduction.pid = 17;
  introduction.host = "there";
  introduction.group = engine::team::GroupEntry().encode();
  EXPECT_NO_THROW(engine::team::GroupEntry::decode(introduction));
  introduction.group.pop_back();
  try {
    engine::team::GroupEntry::decode(introduction);
    FAIL() << "a byte is missing";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Transport);
    EXPECT_THAT(error.what(), HasSubstr("pid 17 on there"));
  }
}

// The process of a rank stops when it has told the others where it can be reached.
class StoppingStore final : public bootstrap::Store {
 public:
  StoppingStore(LocalStore& store, std::latch& goesOn) : store_(store), goesOn_(goesOn) {}
  void set(const std::string& key, const Value& value) override {
    store_.set(key, value);
    if (key.find(".fabric/") != std::string::npos) goesOn_.wait();
  }
  Value get(const std::string& key, Nanoseconds timeout) override {
    return store_.get(key, timeout);
  }
  int64_t add(const std::string& key, int64_t amount) override { return store_.add(key, amount); }
  bool contains(const std::string& key) override { return store_.contains(key); }

 private:
  LocalStore& store_;
  std::latch& goesOn_;
};

TEST(CreateGroup, SaysWhoDoesNotConnectInTime) {
  const Watchdog watchdog;
  LocalStore store;
  std::latch goesOn(1), areDone(2);
  std::vector<std::optional<Error>> errors(2);
  const auto runRank = [&](Rank me) {
    engine::Engine::Options options;
    options.process.settings.nodeId = fmt::format("node{}", me);
    engine::Engine engine(options);
    StoppingStore stopping(store, goesOn);
    try {
      const auto group = me == 0 ? engine.createGroup(store, {"slow", me, 2}, 1'000'000'000)
                                 : engine.createGroup(stopping, {"slow", me, 2}, kTimeout);
      auto request = barrier();
      request.timeout = kTimeout;
      const auto completion = engine.submit(*group, std::move(request));
      engine.wait(*group, *completion);
      errors[static_cast<size_t>(me)] = completion->error();
    } catch (const Error& error) {
      errors[static_cast<size_t>(me)] = error;
    }
    if (me == 0) goesOn.count_down();
    areDone.arrive_and_wait();
  };
  std::thread other(runRank, 1);
  runRank(0);
  other.join();
  ASSERT_TRUE(errors[0]);
  EXPECT_EQ(errors[0]->kind(), ErrorKind::Timeout);
  EXPECT_THAT(errors[0]->what(), HasSubstr("waited 1.0 s for a connection to rank 1 ("));
  // It hears of that, or finds that rank 0 has left.
  EXPECT_TRUE(errors[1]);
}

TEST(CreateGroup, RanksThatWouldChooseDifferentAlgorithmsAreRefused) {
  const Watchdog watchdog;
  runRanks({2}, [](RankContext& rank) {
    engine::groups::GroupSpec spec{"differs", rank.rank, rank.size};
    if (rank.rank == 0) spec.options.algorithm = "allreduce=ring";
    try {
      rank.engine.createGroup(rank.store, spec, kTimeout);
      FAIL() << "made";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::Mismatch);
      EXPECT_THAT(error.what(), HasSubstr("would choose different algorithms"));
    }
  });
}

// Rank 0 gets an entry of rank 1 that it cannot read, when rank 1 has already made the group.
class SpoiledMeeting final : public engine::groups::Meeting {
 public:
  struct Shared {
    std::vector<Introduction> introductions{2};
    std::vector<std::string> nodes;
    std::latch met{2}, made{1};
  };
  SpoiledMeeting(Shared& shared, Rank me) : shared_(shared), me_(me) {}
  engine::groups::Members exchange(const Introduction& mine) override {
    shared_.introductions[static_cast<size_t>(me_)] = mine;
    shared_.met.arrive_and_wait();
    engine::groups::Members members{shared_.introductions, shared_.nodes};
    if (me_ == 1) return members;
    shared_.made.wait();
    members.introductions[1].group.pop_back();
    return members;
  }
  void complete() override { shared_.made.count_down(); }
  Error tell(const Error& error) noexcept override { return error; }

 private:
  Shared& shared_;
  const Rank me_;
};

class HalfMade : public testing::TestWithParam<std::vector<int>> {};

// Nothing else tells rank 1: it no longer waits for the others, and rank 0 lives on.
TEST_P(HalfMade, TheFirstCallSaysWhoCouldNotJoin) {
  const Watchdog watchdog;
  SpoiledMeeting::Shared shared;
  shared.nodes = {"node0", GetParam().size() == 1 ? "node0" : "node1"};
  std::latch areDone(2);
  runRanks(GetParam(), [&](RankContext& rank) {
    SpoiledMeeting meeting(shared, rank.rank);
    const engine::groups::GroupSpec spec{"half", rank.rank, rank.size};
    if (rank.rank == 0) {
      EXPECT_THROW(rank.engine.createGroup(spec, meeting), Error);
    } else {
      const auto group = rank.engine.createGroup(spec, meeting);
      auto request = barrier();
      request.timeout = kTimeout;
      const auto completion = rank.engine.submit(*group, std::move(request));
      rank.engine.wait(*group, *completion);
      ASSERT_TRUE(completion->error());
      EXPECT_THAT(completion->error()->what(), HasSubstr("cannot join group \"half\""));
    }
    areDone.arrive_and_wait();
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, HalfMade,
                         testing::Values(std::vector<int>{2}, std::vector<int>{1, 1}));

}  // namespace
}  // namespace smddp::test
