// Whether callers who leave work in flight come back at once to wait for it, as after isend() and irecv().
//
// If they do, a progress thread that is woken for that work costs more than the work: it takes turns with them on the
// engine and, where cores are few, on the core. So once several have come back soon, one after the other, what is left is
// left to them. The progress thread looks now and then whether somebody has not come back after all.
//
// Threads: all functions from any thread. Votes that race may be lost, which costs a wake-up.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/clock.h"

namespace smddp::engine {

class Habit {
 public:
  // Who comes back within this time would have met the progress thread on its way.
  static constexpr Nanoseconds kSoon = 100'000;
  // So many in a row make a habit.
  static constexpr int kSettled = 8;
  // Without any work left for so long, nobody needs to look.
  static constexpr Nanoseconds kActive = 50'000'000;

  // Somebody lets go of the engine with work in flight that nobody waits for.
  void left(Nanoseconds now) {
    Nanoseconds nothing = kNothing;
    firstLeft_.compare_exchange_strong(nothing, now);
    lastLeft_.store(now);
  }
  // Nothing is in flight any more.
  void ended() {
    if (isLeft()) firstLeft_.store(kNothing);
  }
  // Whether anything has been left since somebody came back, or all of it ended.
  bool isLeft() const { return firstLeft_.load(std::memory_order_relaxed) != kNothing; }
  // A caller begins to wait.
  void returned(Nanoseconds now) {
    const Nanoseconds since = firstLeft_.exchange(kNothing);
    if (since == kNothing) return;
    returns_.store(now - since < kSoon ? std::min(returns_.load() + 1, kSettled) : 0);
  }
  // Nobody came back in time.
  void missed() { returns_.store(0); }

  bool isSettled() const { return returns_.load() >= kSettled; }
  // Settled, and in use.
  bool isActive(Nanoseconds now) const { return isSettled() && now - lastLeft_.load() < kActive; }
  // Whether who has left work is likely to come back for it, or just has.
  bool expects(Nanoseconds now) const {
    const Nanoseconds since = firstLeft_.load();
    return isSettled() && (since == kNothing || now - since < kSoon);
  }

 private:
  static constexpr Nanoseconds kNothing = -1;
  std::atomic<Nanoseconds> firstLeft_{kNothing};
  std::atomic<Nanoseconds> lastLeft_{0};
  std::atomic<int> returns_{0};
};

}  // namespace smddp::engine
