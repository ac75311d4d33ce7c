#include "bootstrap/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <random>
#include <thread>
#include <utility>

#include "bootstrap/node_name.h"
#include "common/error.h"
#include "support/local_store.h"

namespace smddp::bootstrap {
namespace {

using test::LocalStore;
using testing::Each;
using testing::HasSubstr;

constexpr Nanoseconds kPlenty = 20'000'000'000;
constexpr Nanoseconds kShort = 100'000'000;

// Runs each of these ranks on a thread. Returns the text of each rank's exception, or "".
std::vector<std::string> runRanks(const std::vector<Rank>& ranks,
                                  const std::function<void(Rank)>& body) {
  std::vector<std::string> errors(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        body(ranks[i]);
      } catch (const std::exception& error) {
        errors[i] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

std::vector<Rank> firstRanks(int size) {
  std::vector<Rank> ranks(size);
  for (Rank r = 0; r < size; ++r) ranks[r] = r;
  return ranks;
}

// A rank of a group that says which incarnation (life) it is.
Introduction introduce(Rank rank, const std::string& life) {
  Introduction result;
  result.libraryVersion = SMDDP_VERSION;
  result.host = life;
  result.pid = 1000 + rank;
  result.processId.fill(static_cast<std::byte>(rank + 1));
  result.nodeName = "machine";
  return result;
}

// One rendezvous: all ranks must see all others in the same life.
void meet(Store& store, Rank me, int size, const std::string& life, Nanoseconds timeout = kPlenty) {
  Rendezvous rendezvous(store, "g", me, size, timeout);
  const auto all = rendezvous.exchange(introduce(me, life));
  ASSERT_EQ(all.size(), static_cast<size_t>(size));
  for (Rank rank = 0; rank < size; ++rank) {
    EXPECT_EQ(all[rank].host, life) << "rank " << me << " about rank " << rank;
    EXPECT_EQ(all[rank].pid, 1000 + rank);
  }
}

void pauseBriefly(std::mt19937& random) {
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
}

TEST(Rendezvous, EverybodyMeetsEverybody) {
  for (int size = 1; size <= 8; ++size) {
    LocalStore store;
    EXPECT_THAT(runRanks(firstRanks(size), [&](Rank me) { meet(store, me, size, "only"); }),
                Each(""));
  }
}

// A store whose process is so busy that it takes seconds to return a value. The timeout of get() is for that, too.
class BusyStore final : public LocalStore {
 public:
  Value get(const std::string& key, Nanoseconds timeout) override {
    if (timeout < kPlenty) raise(ErrorKind::Timeout, "no answer within {} ns", timeout);
    return LocalStore::get(key, timeout);
  }
};

TEST(Rendezvous, WaitsForABusyStore) {
  BusyStore store;
  EXPECT_THAT(runRanks(firstRanks(4), [&](Rank me) { meet(store, me, 4, "only"); }), Each(""));
  meet(store, 0, 1, "alone");
  EXPECT_THAT(runRanks(firstRanks(4), [&](Rank me) { meet(store, me, 4, "again"); }), Each(""));
}

TEST(Rendezvous, CostsAConstantNumberOfCallsAndKeysPerRank) {
  for (const int size : {2, 8}) {
    LocalStore store;
    runRanks(firstRanks(size), [&](Rank me) { meet(store, me, size, "only"); });
    EXPECT_LE(store.numCalls(), 8U * size);
    EXPECT_LE(store.numKeys(), 4U + size);
  }
}

TEST(Rendezvous, TheSameStoreServesAgainAfterDestroy) {
  // Ranks go through their lives at different speeds. A fast one is in its next rendezvous while a slow one still reads
  // the previous one.
  for (uint32_t seed = 0; seed < 30; ++seed) {
    LocalStore store;
    const int size = 2 + static_cast<int>(seed % 4);
    const auto errors = runRanks(firstRanks(size), [&](Rank me) {
      std::mt19937 random(seed * 100 + me);
      for (int life = 0; life < 3; ++life) {
        pauseBriefly(random);
        meet(store, me, size, fmt::format("life {}", life));
      }
    });
    EXPECT_THAT(errors, Each("")) << "seed " << seed;
  }
}

TEST(Rendezvous, AnyAttemptThatWasCutShortIsForgotten) {
  // Several restarts, with different sizes, in which only some ranks reach the store. Neither the keys that they leave
  // nor the number of their attempts may matter. In the end all ranks meet.
  for (uint32_t seed = 0; seed < 40; ++seed) {
    LocalStore store;
    std::mt19937 random(seed);
    for (int attempt = 0; attempt < 3; ++attempt) {
      const int size = 2 + static_cast<int>(random() % 4);
      std::vector<Rank> present;
      for (Rank r = 0; r < size; ++r) {
        if (random() % 3 != 0) present.push_back(r);
      }
      if (present.size() == static_cast<size_t>(size)) present.pop_back();
      const auto errors = runRanks(present, [&](Rank me) {
        meet(store, me, size, fmt::format("cut {}", attempt), kShort / 10);
      });
      EXPECT_THAT(errors, Each(HasSubstr("waited"))) << "seed " << seed;
    }
    const int size = 2 + static_cast<int>(random() % 4);
    const auto errors = runRanks(firstRanks(size), [&](Rank me) {
      std::mt19937 mine(seed * 100 + me);
      pauseBriefly(mine);
      meet(store, me, size, "last");
    });
    EXPECT_THAT(errors, Each("")) << "seed " << seed;
  }
}

TEST(Rendezvous, ACompleteMeetingOfEarlierProcessesIsNotMistakenForThis) {
  LocalStore store;
  runRanks(firstRanks(3), [&](Rank me) { meet(store, me, 3, "before"); });
  // The store has all keys that ranks 1 and 2 read, but from another life of rank 0.
  const auto errors = runRanks({1, 2}, [&](Rank me) { meet(store, me, 3, "now", kShort); });
  EXPECT_THAT(errors, Each(HasSubstr("of 3 ranks for rank 0:")));
}

TEST(Rendezvous, MissingRanksAreNamedByAll) {
  LocalStore store;
  std::latch begun(4);
  const auto errors = runRanks({0, 1, 3, 5}, [&](Rank me) {
    begun.arrive_and_wait();  // without this, ranks whose threads start late would be missing, too
    // Rank 0 opens the rendezvous; the others must still be waiting then.
    meet(store, me, 6, "now", me == 0 ? 10 * kShort : 30 * kShort);
  });
  for (const auto& text : errors) {
    EXPECT_THAT(text, HasSubstr("of 6 ranks for ranks 2, 4:"));
    EXPECT_THAT(text, HasSubstr("group g"));
  }
}

TEST(Rendezvous, RanksAreNamedByTheirNumbersInTheJob) {
  LocalStore store;
  const auto meetAs = [&](Rank me, const std::string& settings) {
    Introduction mine = introduce(me, "first");
    mine.settings = settings;
    Rendezvous(store, "g", me, 3, 20 * kShort, Seal(), {}, {2, 5, 7}).exchange(mine);
  };
  const auto missing = runRanks({0, 2}, [&](Rank me) { meetAs(me, ""); });
  EXPECT_THAT(missing[0], HasSubstr("rank 2 waited 2.0 s in group g of 3 ranks for rank 5:"));
  EXPECT_THAT(missing[1], HasSubstr("rank 7 waited 2.0 s in group g of 3 ranks for rank 5:"));
  const auto different =
      runRanks(firstRanks(3), [&](Rank me) { meetAs(me, me == 1 ? "SMDDP_CHUNK_BYTES=1\n" : ""); });
  EXPECT_THAT(different, Each(AllOf(HasSubstr("rank 2 ("), HasSubstr("rank 5 ("),
                                    HasSubstr("on ranks 2, 7 and 1 on rank 5"))));
}

TEST(Rendezvous, MissingRankZeroIsNamed) {
  LocalStore store;
  const auto errors = runRanks({1, 2}, [&](Rank me) { meet(store, me, 3, "now", kShort); });
  EXPECT_THAT(errors, Each(HasSubstr("of 3 ranks for rank 0:")));
}

// All have come, but nobody says that the meeting is complete.
TEST(Rendezvous, RankZeroIsNamedIfItDoesNotGoOn) {
  LocalStore store;
  store.add("smddp/g/epoch", 1);
  store.set("smddp/g/1/in/0", serialise(introduce(0, "now")));
  const auto errors = runRanks({1}, [&](Rank me) { meet(store, me, 2, "now", kShort); });
  EXPECT_THAT(errors[0], HasSubstr("of 2 ranks for rank 0:"));
}

TEST(Rendezvous, GroupsDoNotSeeOneAnother) {
  LocalStore store;
  const auto errors = runRanks(firstRanks(4), [&](Rank me) {
    const int half = me / 2;
    Rendezvous rendezvous(store, half == 0 ? "left" : "right", me % 2, 2, kPlenty);
    const auto all = rendezvous.exchange(introduce(me, "now"));
    for (const auto& one : all) EXPECT_EQ((one.pid - 1000) / 2, half);
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(Rendezvous, DisagreementIsTheSameErrorEverywhere) {
  LocalStore store;
  const auto errors = runRanks(firstRanks(3), [&](Rank me) {
    Introduction mine = introduce(me, "now");
    if (me == 2) mine.settings = "SMDDP_CHUNK_BYTES=1\n";
    Rendezvous(store, "g", me, 3, kPlenty).exchange(mine);
  });
  EXPECT_THAT(errors[0], HasSubstr("SMDDP_CHUNK_BYTES"));
  EXPECT_THAT(errors, Each(errors[0]));
}

TEST(Rendezvous, AMalformedIntroductionIsTheSameErrorEverywhere) {
  LocalStore store;
  const auto errors = runRanks(firstRanks(3), [&](Rank me) {
    if (me != 1) {
      meet(store, me, 3, "now");
      return;
    }
    // Rank 1 follows the protocol but writes malformed bytes.
    store.get("smddp/g/0/next", kPlenty);
    store.set("smddp/g/1/in/1", {std::byte{1}, std::byte{2}});
  });
  EXPECT_THAT(errors[0], HasSubstr("what rank 1 published"));
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(AgreeOnNodes, EveryPairIsTriedAndAllComeToTheSameResult) {
  for (int size = 1; size <= 6; ++size) {
    LocalStore store;
    std::atomic<int> probes{0};
    std::vector<Locality> results(size);
    const auto errors = runRanks(firstRanks(size), [&](Rank me) {
      Rendezvous rendezvous(store, "g", me, size, kPlenty);
      Introduction mine = introduce(me, "now");
      mine.nodeName = me % 2 == 0 ? "even" : "odd";
      const auto all = rendezvous.exchange(mine);
      results[me] = rendezvous.agreeOnNodes(all, [&](const Introduction& other, std::string*) {
        EXPECT_EQ(other.nodeName, mine.nodeName);
        EXPECT_NE(other.pid, mine.pid);
        ++probes;
        return true;
      });
    });
    EXPECT_THAT(errors, Each(""));
    const int even = (size + 1) / 2;
    const int odd = size / 2;
    EXPECT_EQ(probes, even * (even - 1) + odd * (odd - 1));
    for (const auto& result : results) EXPECT_EQ(result.nodeOfRank, results[0].nodeOfRank);
    if (size > 2) {
      EXPECT_EQ(results[0].nodeOfRank[0], results[0].nodeOfRank[2]);
      EXPECT_NE(results[0].nodeOfRank[0], results[0].nodeOfRank[1]);
    }
  }
}

TEST(AgreeOnNodes, AFailingOrThrowingProbeSplitsOnAllRanks) {
  for (const bool throws : {false, true}) {
    LocalStore store;
    std::vector<Locality> results(3);
    const auto errors = runRanks(firstRanks(3), [&](Rank me) {
      Rendezvous rendezvous(store, "g", me, 3, kPlenty);
      const auto all = rendezvous.exchange(introduce(me, "now"));
      results[me] = rendezvous.agreeOnNodes(all, [&](const Introduction& other, std::string* why) {
        if (me != 1 || other.pid != 1002) return true;
        if (throws) throw std::runtime_error("permission denied");
        *why = "permission denied";
        return false;
      });
    });
    EXPECT_THAT(errors, Each(""));
    for (const auto& result : results) {
      EXPECT_THAT(result.nodeOfRank, testing::ElementsAre("machine#0", "machine#1", "machine#2"));
      ASSERT_EQ(result.warnings.size(), 1U);
      EXPECT_THAT(result.warnings[0], HasSubstr("permission denied"));
    }
  }
}

TEST(AgreeOnNodes, AFailingProbeUnderAChosenNameIsAnErrorOnAllRanks) {
  LocalStore store;
  const auto errors = runRanks(firstRanks(3), [&](Rank me) {
    Rendezvous rendezvous(store, "g", me, 3, kPlenty);
    Introduction mine = introduce(me, "now");
    Settings settings;
    settings.nodeId = me < 2 ? "twice" : "once";
    mine.nodeName = nodeName(settings);
    const auto all = rendezvous.exchange(mine);
    rendezvous.agreeOnNodes(all, [](const Introduction&, std::string* why) {
      *why = "no such process";
      return false;
    });
  });
  EXPECT_THAT(errors[0], HasSubstr("SMDDP_NODE_ID"));
  EXPECT_THAT(errors, Each(errors[0]));
}

TEST(AgreeOnNodes, ASubgroupOfAcquaintancesNeedsOneRoundAndNoProbe) {
  LocalStore store;
  const auto errors = runRanks(firstRanks(4), [&](Rank me) {
    Introduction mine = introduce(me, "now");
    Rendezvous world(store, "world", me, 4, kPlenty);
    const auto wellDone = [](const Introduction&, std::string*) { return true; };
    mine.nodeAgreement = world.agreeOnNodes(world.exchange(mine), wellDone).agreement;
    if (me % 2 == 1) return;
    Rendezvous sub(store, "sub", me / 2, 2, kPlenty);
    const auto all = sub.exchange(mine);
    const auto fail = [](const Introduction&, std::string*) -> bool {
      throw std::logic_error("was probed again");
    };
    const Locality result = sub.agreeOnNodes(all, fail);
    EXPECT_THAT(result.nodeOfRank, testing::ElementsAre("machine", "machine"));
  });
  EXPECT_THAT(errors, Each(""));
  EXPECT_TRUE(store.contains("smddp/world/1/nodes/0"));
  EXPECT_FALSE(store.contains("smddp/sub/1/nodes/0"));
}

TEST(AgreeOnNodes, ARankThatDiesBetweenTheRoundsIsNamed) {
  LocalStore store;
  const auto errors = runRanks(firstRanks(3), [&](Rank me) {
    Rendezvous rendezvous(store, "g", me, 3, me == 2 ? kPlenty : 10 * kShort);
    const auto all = rendezvous.exchange(introduce(me, "now"));
    if (me == 2) return;
    rendezvous.agreeOnNodes(all, [](const Introduction&, std::string*) { return true; });
  });
  EXPECT_THAT(errors[0], HasSubstr("of 3 ranks for rank 2:"));
  EXPECT_THAT(errors[1], HasSubstr("of 3 ranks for rank 2:"));
}

// Between two meetings one rank finds that it cannot go on.
TEST(Rendezvous, TheTroubleOfOneIsRaisedByAll) {
  for (const Rank troubled : {0, 1}) {
    LocalStore store;
    std::vector<ErrorKind> kinds(3);
    const auto errors = runRanks(firstRanks(3), [&](Rank me) {
      Rendezvous first(store, "g", me, 3, kPlenty);
      first.exchange(introduce(me, "host"));
      try {
        if (me == troubled) {
          const Error error(ErrorKind::Resource, "no descriptors " + std::string(400, 'x'));
          first.tell(error);
          throw error;
        }
        Rendezvous second(store, "g.fabric", me, 3, kPlenty);
        second.follow(first);
        second.exchange(introduce(me, "host"));
      } catch (const Error& error) {
        kinds[me] = error.kind();
        throw;
      }
    });
    EXPECT_THAT(kinds, Each(ErrorKind::Resource));
    EXPECT_THAT(errors, Each(HasSubstr("no descriptors")));
  }
}

TEST(Rendezvous, ARankThatCannotWorkWithRank0IsHeardOfBeforeAllHaveCome) {
  for (const bool differsInVersion : {true, false}) {
    LocalStore store;
    // Rank 2 never comes.
    const auto errors = runRanks({0, 1}, [&](Rank me) {
      Introduction mine = introduce(me, "life");
      if (me == 1 && differsInVersion) mine.libraryVersion = "0.0.0";
      const int size = me == 1 && !differsInVersion ? 4 : 3;
      Rendezvous(store, "g", me, size, kPlenty).exchange(mine);
    });
    const auto* what = differsInVersion ? "run smddp" : "expect groups of 3 and 4 ranks";
    EXPECT_THAT(errors, Each(AllOf(HasSubstr(what), HasSubstr("rank 0 (life, pid 1000) and rank 1 "
                                                              "(life, pid 1001)"))));
  }
}

TEST(Rendezvous, ARankThatRank0DoesNotCountHearsOfItWhenItComes) {
  LocalStore store;
  const auto sizeOf = [](Rank me) { return me == 0 ? 2 : 3; };
  const auto come = [&](Rank me) { meet(store, me, sizeOf(me), "life"); };
  const auto early = runRanks({0, 1}, come);
  const auto late = runRanks({2}, come);
  EXPECT_THAT(early, Each(HasSubstr("expect groups of 2 and 3 ranks")));
  EXPECT_EQ(late.front(), early.front());
  EXPECT_THAT(runRanks(firstRanks(3), [&](Rank me) { meet(store, me, 3, "again"); }), Each(""));
}

TEST(Rendezvous, WhatTheWatchThrowsEndsTheWaitAndTheOthersHearOfIt) {
  struct Signal {};
  LocalStore store;
  std::atomic<bool> interrupted{false};
  const auto errors = runRanks({0, 1}, [&](Rank me) {
    const auto watch = [&]() -> std::vector<Rendezvous::Loss> {
      if (me == 1) throw Signal();
      return {};
    };
    try {
      Rendezvous(store, "g", me, 3, kPlenty, Seal(), watch).exchange(introduce(me, "life"));
    } catch (const Signal&) {
      interrupted.store(true);
    }
  });
  EXPECT_TRUE(interrupted.load());
  EXPECT_THAT(errors.front(), HasSubstr("was interrupted by a signal"));
  EXPECT_EQ(errors.back(), "");
  // That rank may come again.
  EXPECT_THAT(runRanks(firstRanks(3), [&](Rank me) { meet(store, me, 3, "again"); }), Each(""));
}

TEST(Rendezvous, ALostRankIsAnErrorUnlessItHasCome) {
  for (const bool hasCome : {false, true}) {
    LocalStore store;
    const auto errors = runRanks({0, 1, 2}, [&](Rank me) {
      if (me == 2 && !hasCome) return;
      // All hear of the loss at once, and rank 0 comes last.
      if (me == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
      const auto watch = [] {
        return std::vector<Rendezvous::Loss>{
            {2, Error(ErrorKind::PeerLost, "rank 2 is gone"), true}};
      };
      // Before rank 0 has come nobody knows which meeting the rank came to.
      const bool watches = me == 0 || !hasCome;
      Rendezvous(store, "g", me, 3, kPlenty, Seal(), watches ? watch : Rendezvous::Watch())
          .exchange(introduce(me, "life"));
    });
    if (hasCome) {
      EXPECT_THAT(errors, Each(""));
    } else {
      EXPECT_EQ(errors, (std::vector<std::string>{"rank 2 is gone", "rank 2 is gone", ""}));
    }
  }
}

// Rank 0 opens the meeting, hears of a death, says so and leaves: all that between two looks of rank 1.
TEST(Rendezvous, ARankThatLeftBecauseOfAnotherIsNotBlamed) {
  LocalStore store;
  const Rendezvous::Loss death{2, Error(ErrorKind::PeerLost, "rank 2 died"), true};
  const Rendezvous::Loss leave{0, Error(ErrorKind::PeerLost, "rank 0 left"), false};
  const auto errors = runRanks({1}, [&](Rank) {
    bool hasLeft = false;
    const auto watch = [&]() -> std::vector<Rendezvous::Loss> {
      if (!std::exchange(hasLeft, true)) {
        const auto hears = [&] { return std::vector<Rendezvous::Loss>{death}; };
        Rendezvous first(store, "g", 0, 3, kPlenty, Seal(), hears);
        EXPECT_THROW(first.exchange(introduce(0, "life")), Error);
      }
      return {leave};
    };
    Rendezvous(store, "g", 1, 3, kPlenty, Seal(), watch).exchange(introduce(1, "life"));
  });
  EXPECT_EQ(errors.front(), "rank 2 died");
}

// Rank 0 dies before it has opened the meeting, and rank 2 leaves because of that. Rank 1 sees the one shortly before
// it knows of the other.
TEST(Rendezvous, ADeathThatBecomesKnownAfterALeaveIsBlamed) {
  LocalStore store;
  const Rendezvous::Loss death{0, Error(ErrorKind::PeerLost, "rank 0 died"), true};
  const Rendezvous::Loss leave{2, Error(ErrorKind::PeerLost, "rank 2 left"), false};
  for (const bool dies : {true, false}) {
    const auto errors = runRanks({1}, [&](Rank) {
      int looks = 0;
      const auto watch = [&]() -> std::vector<Rendezvous::Loss> {
        if (++looks > 10 && dies) return {death, leave};
        return {leave};
      };
      Rendezvous(store, "g", 1, 3, kPlenty, Seal(), watch).exchange(introduce(1, "life"));
    });
    EXPECT_EQ(errors.front(), dies ? "rank 0 died" : "rank 2 left");
  }
}

TEST(Rendezvous, ARankThatCannotBeginTellsThoseWhoComeLater) {
  for (const Rank troubled : {0, 1, 7}) {
    LocalStore store;
    meet(store, 0, 1, "an earlier meeting");
    reportTrouble(store, "g", troubled, troubled, Seal(),
                  Error(ErrorKind::Usage, "a setting is wrong"));
    std::vector<Rank> others = firstRanks(3);
    std::erase(others, troubled);
    const auto errors = runRanks(others, [&](Rank me) { meet(store, me, 3, "first"); });
    EXPECT_THAT(errors, Each(AllOf(HasSubstr(fmt::format("rank {} (", troubled)),
                                   HasSubstr("cannot take part: a setting is wrong"))));
    EXPECT_THAT(runRanks(firstRanks(3), [&](Rank me) { meet(store, me, 3, "second"); }), Each(""));
  }
}

TEST(Rendezvous, WhatARankFindsAfterwardsReachesThoseWhoAsk) {
  LocalStore store;
  const std::string text = "rank 1 has no connection to rank 0";
  std::latch asked(1), told(1);
  const auto errors = runRanks(firstRanks(2), [&](Rank me) {
    Rendezvous rendezvous(store, "g", me, 2, kPlenty);
    rendezvous.exchange(introduce(me, "first"));
    if (me == 1) {
      asked.wait();
      rendezvous.tell(Error(ErrorKind::PeerLost, text));
      told.count_down();
    } else {
      rendezvous.checkNotes();  // nobody has said anything yet
      asked.count_down();
      told.wait();
      rendezvous.checkNotes();
    }
  });
  EXPECT_EQ(errors[0], text);
  EXPECT_EQ(errors[1], "");
  // The next meeting knows nothing of it.
  EXPECT_THAT(runRanks(firstRanks(2), [&](Rank me) { meet(store, me, 2, "again"); }), Each(""));
}

// A group meets twice if it needs the network. A rank may fail between the two.
TEST(Rendezvous, WhatARankFindsBetweenTwoMeetingsIsHeardInTheSecond) {
  const std::string text = "rank 1 has no network";
  for (const bool meetsAgain : {false, true}) {
    LocalStore store;
    std::latch told(1);
    const auto errors = runRanks(firstRanks(2), [&](Rank me) {
      Rendezvous first(store, "g", me, 2, kPlenty);
      first.exchange(introduce(me, "first"));
      Rendezvous second(store, "g.fabric", me, 2, kPlenty);
      second.follow(first);
      if (me == 0 || meetsAgain) second.exchange(introduce(me, "second"));
      if (me == 1) {
        first.tell(Error(ErrorKind::Transport, text));
        return told.count_down();
      }
      told.wait();
      second.checkNotes();
    });
    EXPECT_EQ(errors[0], text);
    EXPECT_EQ(errors[1], "");
  }
}

TEST(Rendezvous, ARankOutOfRangeIsHeardOfByAll) {
  LocalStore store;
  const auto errors = runRanks({0, 2}, [&](Rank me) { meet(store, me, 2, "life"); });
  EXPECT_THAT(errors, Each(HasSubstr("rank 2 is not a rank of group g, which has 2 ranks")));
}

TEST(Rendezvous, ACounterThatIsNotOursIsRefused) {
  for (const int64_t value : {std::numeric_limits<int64_t>::max(), int64_t{-5}}) {
    LocalStore store;
    store.add("smddp/g/epoch", value);
    EXPECT_THAT(runRanks({0}, [&](Rank me) { meet(store, me, 2, "only", kShort); }),
                Each(HasSubstr("is another program using it?")));
  }
}

TEST(Rendezvous, ValuesThatAreNotOursAreRefused) {
  const auto value = [](std::string_view text) {
    const auto bytes = std::as_bytes(std::span(text));
    return Store::Value(bytes.begin(), bytes.end());
  };
  LocalStore next, closed;
  next.set("smddp/g/0/next", value("1 or so"));
  closed.add("smddp/g/epoch", 1);
  // Rank 1 looks whether the meeting is closed, publishes in it, and waits for its end.
  std::thread poisoner([&] {
    closed.get("smddp/g/1/in/1", kPlenty);
    closed.set("smddp/g/1/closed", value("poison"));
  });
  for (LocalStore* store : {&next, &closed}) {
    EXPECT_THAT(runRanks({1}, [&](Rank me) { meet(*store, me, 2, "only", kPlenty); }),
                Each(testing::AllOf(HasSubstr("the store has \""),
                                    HasSubstr("is another program using it?"))));
  }
  poisoner.join();
}

// Runs a rendezvous in which every rank has its own token.
std::vector<std::string> meetWithTokens(Store& store, const std::vector<std::string>& tokens) {
  const int size = static_cast<int>(tokens.size());
  return runRanks(firstRanks(size), [&](Rank me) {
    Rendezvous rendezvous(store, "g", me, size, kPlenty, Seal(tokens[me]));
    const auto all = rendezvous.exchange(introduce(me, "only"));
    rendezvous.agreeOnNodes(all, [](const Introduction&, std::string*) { return true; });
  });
}

TEST(JobToken, RanksThatShareItMeet) {
  LocalStore store;
  for (int life = 0; life < 3; ++life) {
    EXPECT_THAT(meetWithTokens(store, {"secret", "secret", "secret"}), Each(""));
  }
}

TEST(JobToken, EveryRankNamesWhoDiffers) {
  struct Case {
    const char* of2;
    const char* seenByOthers;
    const char* seenBy2;
  };
  for (const Case& c : {Case{"guess", "rank 2 has another token", "ranks 0-1 have another token"},
                        Case{"", "rank 2 has no token",
                             "is not set on rank 2 of group g, but ranks 0-1 have a token"}}) {
    LocalStore store;
    const auto errors = meetWithTokens(store, {"secret", "secret", c.of2});
    EXPECT_THAT(errors[0], HasSubstr(c.seenByOthers));
    EXPECT_THAT(errors[1], HasSubstr(c.seenByOthers));
    EXPECT_THAT(errors[2], HasSubstr(c.seenBy2));
  }
}

// Changes the value that one rank stores, as an attacker with access to the store could.
class TamperedStore final : public Store {
 public:
  TamperedStore(Store& honest, std::function<Value(const std::string&, Value)> change)
      : honest_(honest), change_(std::move(change)) {}
  void set(const std::string& key, const Value& value) override {
    honest_.set(key, change_(key, value));
  }
  Value get(const std::string& key, Nanoseconds timeout) override {
    return honest_.get(key, timeout);
  }
  int64_t add(const std::string& key, int64_t amount) override { return honest_.add(key, amount); }
  bool contains(const std::string& key) override { return honest_.contains(key); }

 private:
  Store& honest_;
  std::function<Value(const std::string&, Value)> change_;
};

TEST(JobToken, WhatWasChangedOrMovedInTheStoreIsRefused) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    LocalStore store;
    std::mt19937 random(seed);
    Store::Value ofRank0;
    TamperedStore tampered(store, [&](const std::string& key, Store::Value value) {
      if (key == "smddp/g/1/in/0") ofRank0 = value;
      if (key != "smddp/g/1/in/1") return value;
      // A copy of rank 0's value, or one flipped bit.
      if (seed == 0) return store.get("smddp/g/1/in/0", kPlenty);
      value[random() % value.size()] ^= std::byte(1u << random() % 8);
      return value;
    });
    const auto errors = meetWithTokens(tampered, {"secret", "secret"});
    EXPECT_THAT(errors[0], HasSubstr("rank 1 has")) << "seed " << seed;
    EXPECT_THAT(errors[1], HasSubstr("rank 1 has")) << "seed " << seed;
  }
}

}  // namespace
}  // namespace smddp::bootstrap
