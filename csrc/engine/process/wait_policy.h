// Decides how the threads of an engine wait: when they spin, yield, back off, sleep and wake. No other file decides it,
// and no setting changes it. docs/threads.md says what was measured.
//
// A thread can wait in five ways. Each costs the waiting thread, or others, something else:
//   spin      looks again at once. Costs nothing when the wait is short; keeps the core from whoever needs it.
//   yield     gives the core to others, and looks again when it gets it back (sched_yield): some 0.5 us if nobody else
//             wants the core, a whole time slice if another program computes on it.
//   back off  does not yield for a while, since the last yield has lost a time slice (yield_backoff.h).
//   sleep     until woken: 30 to 100 us between the wake-up and the first instruction.
//   poll      sleeps for a fixed time, again and again: where nobody can wake the thread, or it should not be woken.
//
// The decisions:
//
// * A caller of a small allreduce, while nothing else is in flight (spinUntil): spins for kSpinsOfSmallCall looks. If
//   the other ranks have not arrived by then, the call becomes an operation in flight, and its caller waits as the
//   owner.
//
// * The owner of the engine, while nothing advances (IdleWait). Whenever something advances it begins again.
//     1. spins, kSpins times with a pause instruction. The progress thread skips this: what it waits for takes longer.
//     2. moves to another core if one of its mates runs on this one (core_placement.h).
//     3. yields, kYields times, or for as long as the caller asks (Engine::waitForAny); not while it backs off.
//     4. checks the health of mates, lifelines and deadlines, every kHealthPeriod (healthCheckDue).
//     5. sleeps until a mate rings, the network has something, a request comes, or the next health check is due.
//   Where the network cannot wake a thread, or something is still to be sent, it sleeps kNetworkPoll at most.
//
// * A caller that waits while another thread is the owner: sleeps until something has advanced or the owner lets go. It
//   polls every kWaiterPoll besides, because what it waits for can also come from elsewhere.
//
// * The progress thread, while nothing is in flight that nobody waits for: sleeps. A thread that leaves work in flight
//   wakes it, unless callers are predicted to come back for such work at once (wait_predictor.h): then it polls every
//   kParkedPoll, and takes over what nobody has come back for. It wakes every kAnswerPeriod in any case. Where there
//   are other nodes or groups with Engine::watchMembers() it then also checks health, because ranks of other nodes may
//   wait for an answer from this one.
//
// * A caller, waiting in whichever way: lets go of the engine every kInterruptPeriod, and looks whether a signal has
//   ended the wait (common/interrupt.h).
//
// * The thread of DeferredCalls (PollingWait): nobody wakes it when a call may begin, so it yields first and then
//   polls, less and less often.
//
// Threads: spinUntil() and PollingWait anywhere; noteWorkLeft(), callerCameBack() and ended() on any thread;
// beginPoll(), takesWork() and endPoll() on a progress thread; the rest on the thread that owns the engine. Ends with
// the engine.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>

#include "engine/process/core_placement.h"
#include "engine/process/process.h"
#include "engine/process/wait_predictor.h"
#include "engine/process/yield_backoff.h"

namespace smddp::engine::process {

class WaitPolicy {
 public:
  static constexpr int kSpinsOfSmallCall = 64;
  static constexpr int kSpins = 20;
  static constexpr int kYields = 100;
  static constexpr Nanoseconds kHealthPeriod = 5'000'000;
  static constexpr Nanoseconds kNetworkPoll = 100'000;
  static constexpr std::chrono::milliseconds kWaiterPoll{1};
  static constexpr std::chrono::milliseconds kParkedPoll{1};
  static constexpr std::chrono::milliseconds kAnswerPeriod{250};
  static constexpr Nanoseconds kInterruptPeriod = 50'000'000;

  explicit WaitPolicy(Process& process)
      : process_(process), placement_(process.memory().slab->page()) {}

  // True if `condition` holds now or after a few looks.
  template <typename Condition>
  static bool spinUntil(const Condition& condition) {
    bool holds = false;
    for (int spin = 0; spin < kSpinsOfSmallCall && !holds; ++spin) holds = condition();
    return holds;
  }

  // --- the owner, while nothing advances ---

  enum class Waiter { Caller, ProgressThread };

  // One wait of the owner, from the first spin to the sleep.
  class IdleWait {
   public:
    // With `yieldFor` it yields for so long instead of kYields times.
    IdleWait(WaitPolicy& policy, Waiter waiter, Nanoseconds yieldFor)
        : policy_(policy), firstRound_(waiter == Waiter::Caller ? 0 : kSpins), yieldFor_(yieldFor) {
      policy.placement_.note();
      reset();
    }
    // Something has advanced.
    void reset() {
      round_ = firstRound_;
      yieldUntil_ = 0;
    }
    // Spins or yields once. False: it is time to sleep.
    bool spinOrYield() { return round_ < kSpins ? spin() : yield(); }

   private:
    bool spin();
    bool yield();

    WaitPolicy& policy_;
    const int firstRound_;
    const Nanoseconds yieldFor_;
    int round_ = 0;
    Nanoseconds yieldUntil_ = 0;
  };

  // True if the health check is due; the next one is due kHealthPeriod later.
  bool healthCheckDue();
  // How long the owner may sleep.
  Nanoseconds untilHealthCheck() const;

  // --- work in flight that nobody waits for ---

  // A caller lets go of work in flight. True: the progress thread has to be woken.
  bool noteWorkLeft() {
    predictor_.noteWorkLeft(process_.clock().now());
    return !parkedPolls_.load() || !predictor_.isConfident();
  }
  // A caller begins to wait.
  void callerCameBack() {
    if (predictor_.hasLeftWork()) predictor_.cameBack(process_.clock().now());
  }
  // Nothing is in flight any more.
  void ended() { predictor_.ended(); }

  // The parked progress thread asks, before it looks for work, whether it polls for work. If not, callers wake it.
  bool beginPoll() {
    const bool polls = predictor_.isActive(process_.clock().now());
    parkedPolls_.store(polls);
    return polls;
  }
  // There is work that nobody waits for. Whether the progress thread takes it over.
  bool takesWork(bool polls) {
    if (!polls) return true;
    if (predictor_.expectsReturn(process_.clock().now())) return false;
    predictor_.didNotComeBack();
    return true;
  }
  void endPoll() { parkedPolls_.store(false); }

 private:
  Process& process_;
  CorePlacement placement_;
  YieldBackoff yields_;
  WaitPredictor predictor_;
  std::atomic<bool> parkedPolls_{false};
  Nanoseconds nextHealthCheck_ = 0;
};

// For a thread that nobody can wake: one object for each wait.
class PollingWait {
 public:
  // Gives up the core once, or sleeps for a while.
  void wait();

 private:
  int yields_ = 0;
  std::chrono::microseconds sleep_ = std::chrono::microseconds(20);
};

}  // namespace smddp::engine::process
