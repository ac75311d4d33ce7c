// A process may fork at any time, whatever its other threads do.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "bootstrap/lifeline_wire.h"
#include "engine/calls.h"
#include "support/ranks.h"

namespace smddp::test {
namespace {

using bootstrap::Endpoint;
using GetName = int (*)(int, sockaddr*, socklen_t*);

Endpoint lifelineOf(engine::Engine& engine) {
  Endpoint endpoint;
  engine.progress().call([&] {
    const auto mine = engine.process().introduce({});
    endpoint = bootstrap::parseLifelineAddress(mine.lifeline, "this rank").endpoint;
  });
  return endpoint;
}

// Counts the sockets that listen at the lifeline's address or have it at one end. It is called in a child, so it calls
// nothing that locks.
int socketsOf(const Endpoint& lifeline) {
  int found = 0;
  for (int fd = 3; fd < 512; ++fd) {
    for (const GetName get :
         {static_cast<GetName>(&getsockname), static_cast<GetName>(&getpeername)}) {
      Endpoint name;
      socklen_t size = sizeof name.storage;
      if (get(fd, name.address(), &size) != 0) continue;
      found += std::memcmp(name.address(), lifeline.address(), lifeline.size()) == 0 ? 1 : 0;
    }
  }
  return found;
}

// The number of lifeline sockets in a child that is forked now.
int socketsInChild(const std::vector<Endpoint>& lifelines) {
  const pid_t child = fork();
  if (child == 0) {
    int found = 0;
    for (const Endpoint& lifeline : lifelines) found += socketsOf(lifeline);
    _exit(found);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

TEST(Fork, AChildHoldsNoConnectionWhateverTheParentWasDoing) {
  std::vector<Endpoint> lifelines(2);
  std::atomic<int> known{0};
  std::atomic<bool> stop{false};
  // Ends the ranks, also when an assertion ends the test early.
  std::thread ranks([&] {
    runRanks({1, 1}, [&](RankContext& rank) {
      lifelines[static_cast<size_t>(rank.rank)] = lifelineOf(rank.engine);
      ++known;
      // Rank 0 decides, for both, when to end.
      for (bool last = false; !last;) {
        last = stop.load();
        Block flag(1);
        flag.bytes()[0] = static_cast<std::byte>(last);
        rank.run(broadcast(flag.bytes(), 0));
        last = flag.bytes()[0] != std::byte{0};
      }
    });
  });
  while (known < 2) std::this_thread::yield();
  EXPECT_GE(socketsOf(lifelines[0]) + socketsOf(lifelines[1]), 4);  // two listen, one connection
  for (int i = 0; i < 50; ++i) EXPECT_EQ(socketsInChild(lifelines), 0) << "fork " << i;
  stop = true;
  ranks.join();
}

TEST(Fork, AChildHoldsNoConnectionWhileTheParentSleepsInACall) {
  std::vector<Endpoint> lifelines(2);
  runRanks({1, 1}, [&](RankContext& rank) {
    lifelines[static_cast<size_t>(rank.rank)] = lifelineOf(rank.engine);
    rank.run(barrier());
    if (rank.rank == 0) return rank.run(barrier());
    // Meanwhile rank 0 waits.
    for (int i = 0; i < 20; ++i) EXPECT_EQ(socketsInChild(lifelines), 0) << "fork " << i;
    rank.run(barrier());
  });
}

TEST(Fork, AChildIsToldThatItCannotUseTheGroupsOfItsParent) {
  runRanks({2}, [](RankContext& rank) {
    rank.run(barrier());
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // ends a child that waits for threads it does not have
      // What ends groups or frees memory has no effect.
      rank.engine.keep(*rank.group, std::make_shared<int>(1));
      rank.engine.fail(*rank.group, Error(ErrorKind::Aborted, "enough"));
      rank.engine.waitForOpenCalls(*rank.group, {});
      rank.engine.destroyGroup(rank.group);
      try {
        rank.engine.submit(*rank.group, barrier());
      } catch (const Error& error) {
        const std::string text = error.what();
        const bool isTold = text.find("in a process that was forked") != std::string::npos &&
                            text.find("group \"test\"") != std::string::npos;
        _exit(error.kind() == ErrorKind::Usage && isTold ? 0 : 1);
      }
      _exit(2);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
    rank.run(barrier());
  });
}

}  // namespace
}  // namespace smddp::test
