#include "transport/shm/doorbell.h"

#include <sys/eventfd.h>

#include <atomic>
#include <random>
#include <thread>

#include "support/watchdog.h"
#include "transport/shm/child.h"
#include "transport/shm/liveness.h"

namespace smddp::transport::shm {
namespace {

using test::Watchdog;
using testing::Child;
using testing::eventually;
using testing::kSecond;

#if defined(SMDDP_SANITIZE_THREAD)
constexpr uint32_t kRounds = 20'000;
#else
constexpr uint32_t kRounds = 100'000;
#endif

// Usually the rounds take a second. On a busy machine each may take a time slice; then the test ends after fewer
// rounds.
constexpr Nanoseconds kEnough = 8 * kSecond;
// Nobody needs so long for a turn, however busy the machine is. It bounds the duration of a failing test.
constexpr Nanoseconds kLost = 100 * kSecond;
// Longer than the watchdog waits: whoever was rung and sleeps on hangs.
constexpr Nanoseconds kForever = 3600 * kSecond;
// The first player stores this instead of a round's number to end the game early.
constexpr uint32_t kOver = ~uint32_t{0};

// One side of a ping-pong: it waits for `theirs`, and then sets `mine` after a random delay.
struct Player {
  std::shared_ptr<Slab> slab;
  std::shared_ptr<Mate> mate;
  std::atomic<uint32_t>* mine;    // in the mate's slab: our turns
  std::atomic<uint32_t>* theirs;  // in our slab: the mate's turns
  bool first;
  bool mixed;  // alternate between sleep() and sleepOn()
  uint32_t seed;

  // The number of the round in which a wake-up was lost; 0 if none was.
  uint32_t play() const {
    Doorbell doorbell(slab);
    std::mt19937 random(seed);
    const MonotonicClock clock;
    const int never = eventfd(0, EFD_CLOEXEC);
    const Deadline enough = Deadline::after(clock, kEnough);
    uint32_t lost = 0;
    for (uint32_t round = 1; round <= kRounds && lost == 0; ++round) {
      const bool over = first && enough.passed(clock);
      if (first) turn(random, over ? kOver : round);
      if (over) break;
      // Spin for a while, as the engine does. So a side often falls asleep at the moment when the other one rings.
      for (uint32_t spins = logUniform(random, 14); spins > 0; --spins) {
        if (theirs->load(std::memory_order_acquire) >= round) break;
      }
      // After a lost wake-up it sleeps for the whole time.
      const Deadline deadline = Deadline::after(clock, kLost);
      while (theirs->load(std::memory_order_acquire) < round && lost == 0) {
        doorbell.prepare();
        if (theirs->load(std::memory_order_acquire) >= round) {
          doorbell.cancel();
          break;
        }
        if (mixed && random() % 2 == 0) {
          doorbell.sleepOn(never, kLost);
        } else {
          doorbell.sleep(kLost);
        }
        if (deadline.passed(clock)) lost = round;
      }
      if (theirs->load(std::memory_order_acquire) == kOver) break;
      if (!first) turn(random, round);
    }
    close(never);
    return lost;
  }

  static uint32_t logUniform(std::mt19937& random, uint32_t bits) {
    return random() % (uint32_t{1} << random() % bits);
  }

  void turn(std::mt19937& random, uint32_t round) const {
    for (uint32_t i = logUniform(random, 13); i > 0; --i) {
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
    mine->store(round, std::memory_order_release);
    Doorbell::ring(*mate);
  }
};

std::atomic<uint32_t>* counterAt(std::byte* data, uint64_t offset) {
  return reinterpret_cast<std::atomic<uint32_t>*>(data + offset);
}

class DoorbellPingPong : public ::testing::TestWithParam<bool> {};

TEST_P(DoorbellPingPong, BetweenProcessesLosesNoWakeUp) {
  Child child([](const Child::Line& line) {
    const auto slab = Slab::create();
    const auto counter = slab->allocate(4096);
    line.send(slab->address());
    const auto mate = Mate::attach(line.receive<SegmentAddress>());
    const uint64_t offset = slab->offsetOf(counter.data());
    const Player player{
        slab,       mate, counterAt(mate->data(), offset), counterAt(slab->data(), offset), false,
        GetParam(), 2};
    const uint32_t lost = player.play();
    line.send(lost);
    line.receive<char>();
    return lost == 0 ? 0 : 1;
  });
  const auto slab = Slab::create();
  const uint64_t offset = slab->offsetOf(slab->allocate(4096).data());
  const auto mate = Mate::attach(child.receive<SegmentAddress>());
  child.send(slab->address());
  const Player player{
      slab,       mate, counterAt(mate->data(), offset), counterAt(slab->data(), offset), true,
      GetParam(), 1};
  EXPECT_EQ(player.play(), 0u) << "slept through this round";
  EXPECT_EQ(child.receive<uint32_t>(), 0u) << "the child slept through this round";
  child.send('x');
  EXPECT_EQ(child.wait(), 0);
}

TEST_P(DoorbellPingPong, BetweenThreadsLosesNoWakeUp) {
  const std::shared_ptr<Slab> slabs[] = {Slab::create(Slab::kLeastReserve),
                                         Slab::create(Slab::kLeastReserve)};
  uint64_t offset = 0;
  for (const auto& slab : slabs) offset = slab->offsetOf(slab->allocate(4096).data());
  uint32_t lost[2] = {1, 1};
  const auto run = [&](int me) {
    const auto mate = Mate::attach(slabs[1 - me]->address());
    const Player player{slabs[me],
                        mate,
                        counterAt(mate->data(), offset),
                        counterAt(slabs[me]->data(), offset),
                        me == 0,
                        GetParam(),
                        static_cast<uint32_t>(me + 10)};
    lost[me] = player.play();
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  EXPECT_EQ(lost[0], 0u);
  EXPECT_EQ(lost[1], 0u);
}

INSTANTIATE_TEST_SUITE_P(Doorbell, DoorbellPingPong, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "FutexAndPoll" : "Futex"; });

// The core of the protocol, without the sleep, which would hide mistakes. One side calls prepare() and checks the flag,
// the other stores the flag and calls ring(). One of the two must see the other, however they interleave.
TEST(Doorbell, SleeperSeesTheFlagOrIsRung) {
  const auto slab = Slab::create(Slab::kLeastReserve);
  const auto mate = Mate::attach(slab->address());
  Doorbell doorbell(slab);
  std::atomic<uint32_t> last{3 * kRounds};
  alignas(64) std::atomic<uint32_t> flag{0};
  alignas(64) std::atomic<uint32_t> started{0};
  alignas(64) std::atomic<uint32_t> finished{0};
  const auto await = [&](const std::atomic<uint32_t>& counter, uint32_t value) {
    for (uint32_t spins = 0; counter.load(std::memory_order_acquire) < value; ++spins) {
      // Take the cache line from the other core, so that its next store to the line is delayed.
      slab->page().sleep.load(std::memory_order_relaxed);
      if (spins > 1000) std::this_thread::yield();  // more threads than cores
    }
  };
  std::thread waker([&] {
    for (uint32_t round = 1; round <= last; ++round) {
      await(started, round);
      for (uint32_t i = round % 16; i > 0; --i) std::atomic_signal_fence(std::memory_order_seq_cst);
      flag.store(round, std::memory_order_release);
      Doorbell::ring(*mate);
      finished.store(round, std::memory_order_release);
    }
  });
  const MonotonicClock clock;
  const Deadline enough = Deadline::after(clock, kEnough);
  uint32_t missed = 0;
  for (uint32_t round = 1; round <= last; ++round) {
    // Store this before the waker checks if there is another round.
    if (enough.passed(clock)) last.store(round);
    started.store(round, std::memory_order_release);
    for (uint32_t i = round / 16 % 64; i > 0; --i) {
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
    doorbell.prepare();
    const bool saw = flag.load(std::memory_order_acquire) == round;
    await(finished, round);
    const bool rung = slab->page().sleep.load() == Sleep::Awake;
    missed += !saw && !rung;
    doorbell.cancel();
  }
  waker.join();
  EXPECT_EQ(missed, 0u) << "wake-ups lost in " << last << " meetings";
}

TEST(Doorbell, RingSelfFromManyThreadsLosesNoWakeUp) {
  const auto slab = Slab::create(Slab::kLeastReserve);
  Doorbell doorbell(slab);
  constexpr int kThreads = 3;
  constexpr uint32_t kEach = 5000;
  std::atomic<uint32_t> queued{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (uint32_t i = 0; i < kEach; ++i) {
        for (uint32_t spin = random() % 2000; spin > 0; --spin) {
          std::atomic_signal_fence(std::memory_order_seq_cst);
        }
        queued.fetch_add(1, std::memory_order_release);
        doorbell.ringSelf();
      }
    });
  }
  const int never = eventfd(0, EFD_CLOEXEC);
  const Watchdog watchdog;
  uint32_t seen = 0;
  while (seen < kThreads * kEach) {
    doorbell.prepare();
    if (const uint32_t now = queued.load(std::memory_order_acquire); now != seen) {
      doorbell.cancel();
      seen = now;
      continue;
    }
    seen % 2 == 0 ? doorbell.sleep(kForever) : doorbell.sleepOn(never, kForever);
  }
  for (auto& thread : threads) thread.join();
  close(never);
}

TEST(Doorbell, RingBeforeSleepIsNotForgotten) {
  const auto slab = Slab::create(Slab::kLeastReserve);
  const auto mate = Mate::attach(slab->address());
  Doorbell doorbell(slab);
  const int never = eventfd(0, EFD_CLOEXEC);
  const Watchdog watchdog;
  for (int i = 0; i < 100; ++i) {
    doorbell.prepare();
    Doorbell::ring(*mate);
    doorbell.sleep(kForever);
    doorbell.prepare();
    doorbell.ringSelf();
    doorbell.sleepOn(never, kForever);
  }
  close(never);
}

TEST(Doorbell, EveryWaitEnds) {
  const auto slab = Slab::create(Slab::kLeastReserve);
  Doorbell doorbell(slab);
  const int never = eventfd(0, EFD_CLOEXEC);
  for (const Nanoseconds timeout : {Nanoseconds{-5}, Nanoseconds{0}, Nanoseconds{1'000'000}}) {
    doorbell.prepare();
    doorbell.sleep(timeout);
    doorbell.prepare();
    doorbell.sleepOn(never, timeout);
  }
  EXPECT_EQ(slab->page().sleep.load(), Sleep::Awake);
  close(never);
}

TEST(Doorbell, DescriptorWakesToo) {
  const auto slab = Slab::create(Slab::kLeastReserve);
  Doorbell doorbell(slab);
  const int ready = eventfd(1, EFD_CLOEXEC);
  const Watchdog watchdog;
  doorbell.prepare();
  doorbell.sleepOn(ready, kForever);
  close(ready);
}

// A write to a pipe without a reader would raise SIGPIPE.
TEST(Doorbell, RingingTheDeadIsHarmless) {
  for (const bool openedBefore : {false, true}) {
    Child child([](const Child::Line& line) {
      const auto slab = Slab::create();
      const LifeLock lifeLock(slab);
      Doorbell doorbell(slab);
      line.send(slab->address());
      const int never = eventfd(0, EFD_CLOEXEC);
      for (;;) {
        doorbell.prepare();
        doorbell.sleepOn(never, 60 * kSecond);
        line.send('w');
      }
      return 0;
    });
    const auto mate = Mate::attach(child.receive<SegmentAddress>());
    const auto asleep = [&] { return mate->page().sleep.load() == Sleep::OnPoll; };
    ASSERT_TRUE(eventually(asleep));
    if (openedBefore) {
      Doorbell::ring(*mate);
      EXPECT_EQ(child.receive<char>(), 'w');
      ASSERT_TRUE(eventually(asleep));
    }
    child.kill(SIGKILL);
    child.wait();
    ASSERT_TRUE(eventually([&] { return lifeOf(*mate) == Life::Died; }));
    Doorbell::ring(*mate);
    EXPECT_EQ(mate->page().sleep.load(), Sleep::Awake);
  }
}

TEST(Doorbell, NeverWritesIntoAFileThatIsNotItsPipe) {
  const auto slab = Slab::create(Slab::kLeastReserve);
  const auto mate = Mate::attach(slab->address());
  FILE* file = tmpfile();
  ASSERT_NE(file, nullptr);
  slab->page().pipeDescriptor.store(fileno(file));
  slab->page().pipeInode.store(1);
  slab->page().sleep.store(Sleep::OnPoll);
  Doorbell::ring(*mate);
  fseek(file, 0, SEEK_END);
  EXPECT_EQ(ftell(file), 0);
  fclose(file);
}

}  // namespace
}  // namespace smddp::transport::shm
