// Predicts whether a caller that leaves work in flight comes back at once to wait for it, as after isend() and irecv().
//
// If it does, a progress thread that is woken for that work costs more than the work: it competes with the caller for
// the engine and, where cores are few, for the core. So after several quick returns in a row the work is left to the
// caller, and the progress thread is not woken. It polls instead, and takes over the work if the caller does not come
// back.
//
// Threads: all functions from any thread. Two updates at the same time may lose one, which costs a wake-up.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/clock.h"

namespace smddp::engine::process {

class WaitPredictor {
 public:
  // A caller that comes back within this time does so before a woken progress thread has begun.
  static constexpr Nanoseconds kQuickReturn = 100'000;
  // So many quick returns in a row make the predictor confident.
  static constexpr int kReturnsNeeded = 8;
  // When no work has been left for so long, the progress thread need not poll.
  static constexpr Nanoseconds kActive = 50'000'000;

  // A caller lets go of the engine, and nobody waits for what is in flight.
  void noteWorkLeft(Nanoseconds now) {
    Nanoseconds nothing = kNothing;
    firstLeft_.compare_exchange_strong(nothing, now);
    lastLeft_.store(now);
  }
  // Nothing is in flight any more.
  void ended() {
    if (hasLeftWork()) firstLeft_.store(kNothing);
  }
  // True if work has been left since a caller came back, and has not ended.
  bool hasLeftWork() const { return firstLeft_.load(std::memory_order_relaxed) != kNothing; }
  // A caller begins to wait.
  void cameBack(Nanoseconds now) {
    const Nanoseconds since = firstLeft_.exchange(kNothing);
    if (since == kNothing) return;
    returns_.store(now - since < kQuickReturn ? std::min(returns_.load() + 1, kReturnsNeeded) : 0);
  }
  // No caller has come back in time.
  void didNotComeBack() { returns_.store(0); }

  bool isConfident() const { return returns_.load() >= kReturnsNeeded; }
  // Confident, and work has been left a short time ago.
  bool isActive(Nanoseconds now) const { return isConfident() && now - lastLeft_.load() < kActive; }
  // True if the caller that has left work is likely to come back for it, or has just come back.
  bool expectsReturn(Nanoseconds now) const {
    const Nanoseconds since = firstLeft_.load();
    return isConfident() && (since == kNothing || now - since < kQuickReturn);
  }

 private:
  static constexpr Nanoseconds kNothing = -1;
  std::atomic<Nanoseconds> firstLeft_{kNothing};
  std::atomic<Nanoseconds> lastLeft_{0};
  std::atomic<int> returns_{0};
};

}  // namespace smddp::engine::process
