#include "transport/shm/liveness.h"

#include <sys/prctl.h>

#include <thread>

#include "common/error.h"
#include "transport/shm/child.h"
#include "transport/shm/doorbell.h"

namespace smddp::transport::shm {
namespace {

using testing::Child;
using testing::eventually;

// Makes a child that publishes its slab and then runs `body`.
template <typename Body>
auto processThat(Body body) {
  return [body](const Child::Line& line) {
    const auto slab = Slab::create();
    line.send(slab->address());
    return body(line, slab);
  };
}

TEST(Liveness, KilledProcessIsSeenThoughNobodyReapsIt) {
  for (const int signal : {SIGKILL, SIGTERM, SIGSEGV}) {
    Child child(processThat([](const Child::Line& line, const auto& slab) {
      ::signal(SIGSEGV, SIG_DFL);  // the sanitizers have a handler
      const LifeLock lifeLock(slab);
      line.send('r');
      pause();
      return 0;
    }));
    const auto mate = Mate::attach(child.receive<SegmentAddress>());
    child.receive<char>();
    for (int i = 0; i < 1000; ++i) ASSERT_EQ(lifeOf(*mate), Life::Running);
    child.kill(signal);
    ASSERT_TRUE(eventually([&] { return lifeOf(*mate) != Life::Running; }));
    EXPECT_EQ(lifeOf(*mate), Life::Died);
    EXPECT_EQ(mate->page().life.load(), Life::Died) << "not published";
    EXPECT_EQ(describeLife(*mate), "its process died");
    EXPECT_EQ(child.wait(), -signal);
    EXPECT_EQ(lifeOf(*mate), Life::Died);
  }
}

TEST(Liveness, LifeLockMayBeHeldByAnotherThread) {
  Child child(processThat([](const Child::Line& line, const auto& slab) {
    std::thread([&] {
      const LifeLock lifeLock(slab);
      line.send('r');
      pause();
    }).join();
    return 0;
  }));
  const auto mate = Mate::attach(child.receive<SegmentAddress>());
  child.receive<char>();
  EXPECT_EQ(lifeOf(*mate), Life::Running);
  child.kill(SIGKILL);
  EXPECT_TRUE(eventually([&] { return lifeOf(*mate) == Life::Died; }));
}

TEST(Liveness, ProcessWithoutLifeLockIsSeenToo) {
  Child child(processThat([](const Child::Line&, const auto&) {
    pause();
    return 0;
  }));
  const auto mate = Mate::attach(child.receive<SegmentAddress>());
  EXPECT_EQ(lifeOf(*mate), Life::Running);
  child.kill(SIGKILL);
  EXPECT_TRUE(eventually([&] { return lifeOf(*mate) == Life::Died; })) << "as a zombie";
}

TEST(Liveness, ReleasedLifeLockIsNoDeath) {
  Child child(processThat([](const Child::Line& line, const auto& slab) {
    for (int i = 0; i < 20'000; ++i) LifeLock{slab};
    line.send('r');
    line.receive<char>();
    return 0;
  }));
  const auto mate = Mate::attach(child.receive<SegmentAddress>());
  for (int i = 0; i < 2'000'000 && lifeOf(*mate) == Life::Running; ++i) {
  }
  EXPECT_EQ(lifeOf(*mate), Life::Running);
  child.receive<char>();
  child.send('x');
  EXPECT_EQ(child.wait(), 0);
  EXPECT_TRUE(eventually([&] { return lifeOf(*mate) != Life::Running; }));
}

TEST(Liveness, LeavingIsNotDying) {
  Child child(processThat([](const Child::Line& line, const auto& slab) {
    const LifeLock lifeLock(slab);
    line.receive<char>();
    slab->page().leave("shutdown was called");
    slab->page().leave("and again");
    _exit(0);  // the process ends while the thread with the life lock still runs
    return 0;
  }));
  const auto mate = Mate::attach(child.receive<SegmentAddress>());
  EXPECT_EQ(lifeOf(*mate), Life::Running);
  child.send('x');
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(lifeOf(*mate), Life::Left);
  EXPECT_EQ(describeLife(*mate), "it left: shutdown was called");
}

TEST(Liveness, ExitWithoutGoodbyeIsADeath) {
  Child child(processThat([](const Child::Line& line, const auto& slab) {
    const LifeLock lifeLock(slab);
    line.receive<char>();
    _exit(0);
    return 0;
  }));
  const auto mate = Mate::attach(child.receive<SegmentAddress>());
  child.send('x');
  EXPECT_TRUE(eventually([&] { return lifeOf(*mate) == Life::Died; }));
}

TEST(Liveness, DestroyedSlabHasLeft) {
  auto slab = Slab::create(Slab::kLeastReserve);
  const auto mate = Mate::attach(slab->address());
  EXPECT_EQ(lifeOf(*mate), Life::Running);
  slab.reset();
  EXPECT_EQ(lifeOf(*mate), Life::Left);
}

TEST(Liveness, ReusedPidIsNotTheMate) {
  const auto slab = Slab::create(Slab::kLeastReserve);
  const auto mate = Mate::attach(slab->address());
  slab->page().startTime += 1;  // as if this process had started later than the mate did
  EXPECT_TRUE(eventually([&] { return lifeOf(*mate) == Life::Died; }));
}

TEST(Liveness, StartTimeTellsProcessesApart) {
  EXPECT_GT(startTimeOf(getpid()).value_or(0), 0u);
  EXPECT_EQ(startTimeOf(getpid()), startTimeOf(getpid()));
  EXPECT_EQ(startTimeOf(1 << 30), 0u);
  // A name with parentheses and spaces must not shift the fields.
  Child child([](const Child::Line& line) {
    prctl(PR_SET_NAME, "a) Z (b 1");
    line.send(startTimeOf(getpid()).value_or(0));
    line.receive<char>();
    return 0;
  });
  const auto itself = child.receive<uint64_t>();
  EXPECT_GT(itself, 0u);
  EXPECT_EQ(startTimeOf(child.pid()), itself);
  child.kill(SIGKILL);
  EXPECT_TRUE(eventually([&] { return startTimeOf(child.pid()) == 0u; })) << "a zombie lives";
}

TEST(Liveness, FreezersOfBothVersions) {
  const auto files =
      freezerFiles("9:name=systemd:/\n6:freezer:/a/b\n1:cpu,freezers:/\n0::/c:d\nx\n:\n");
  std::vector<std::string> paths;
  for (const auto& file : files) paths.push_back(fmt::format("{} {}", file.path, file.frozen));
  EXPECT_EQ(paths, (std::vector<std::string>{"/freezer/a/b/freezer.state FROZEN",
                                             "/c:d/cgroup.events frozen 1",
                                             "/unified/c:d/cgroup.events frozen 1"}));
  EXPECT_TRUE(freezerFiles("").empty());
  EXPECT_FALSE(isFrozen(getpid()));
  EXPECT_FALSE(isFrozen(1 << 30));
}

TEST(OnceText, FirstWriterWinsAndLengthIsBounded) {
  OnceText<8> text;
  EXPECT_FALSE(text.written());
  EXPECT_EQ(text.read(), "");
  EXPECT_TRUE(text.write("first and long"));
  EXPECT_FALSE(text.write("second"));
  EXPECT_EQ(text.read(), "first an");
  OnceText<8> empty;
  EXPECT_TRUE(empty.write(""));
  EXPECT_TRUE(empty.written());
  // A mate that overwrites the length must not make us read beyond the text.
  struct {
    uint32_t claimed = 1, lengthPlusOne = 0x7fffffff;
    char text[8] = {'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'};
  } forged;
  static_assert(sizeof forged == sizeof text);
  EXPECT_EQ(reinterpret_cast<OnceText<8>&>(forged).read(), "abcdefgh");
}

}  // namespace
}  // namespace smddp::transport::shm
