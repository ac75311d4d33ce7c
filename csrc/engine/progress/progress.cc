#include "engine/progress/progress.h"

#include <chrono>
#include <optional>
#include <utility>

#include "common/interrupt.h"
#include "common/log.h"

namespace smddp::engine::progress {
namespace {

// A caller for whom something advances all the time looks at the clock every so many turns.
constexpr uint32_t kTurnsPerLook = 64;
// The owner lets go to free the memory of so many operations, even if it has other work.
constexpr size_t kMuchMemory = 16;
// The simulator has its own clock; signals come by the real one.
constexpr std::chrono::nanoseconds kInterruptTime(process::WaitPolicy::kInterruptPeriod);

}  // namespace

Progress::Progress(Ownership& ownership, process::Process& process, groups::GroupRegistry& groups,
                   bool hasThreads)
    : ownership_(ownership),
      process_(&process),
      doorbell_(process.doorbell()),
      groups_(groups),
      hasThreads_(hasThreads),
      policy_(process),
      threads_(*this, policy_) {
  if (hasThreads) threads_.start(process.memory().slab);
}

void Progress::stop() {
  threads_.beginStop();
  doorbell_->ringSelf();
  threads_.join();
  process_ = nullptr;
}

// --- actions for the owner --------------------------------------------------------------------------------

void Progress::post(Inbox::Action action) {
  leaveForOwner(std::move(action));
  // The owner may have let go between our look and the push. Then this thread takes the action up.
  if (!ownership_.tryAcquire()) return;
  drainInbox();
  letGo();
}

void Progress::leaveForOwner(Inbox::Action action) {
  inbox_.push(std::move(action));
  doorbell_->ringSelf();
}

// An action that throws breaks the groups with something in flight. The other actions still run, and so does the owner.
void Progress::drainInbox() {
  while (!inbox_.empty()) {
    for (const auto& action : inbox_.take()) guarded(action);
    if (waiters_.any()) waiters_.wake();
  }
}

void Progress::call(const std::function<void()>& action) {
  if (ownership_.tryAcquire()) {
    std::exception_ptr error;
    drainInbox();
    try {
      action();
    } catch (...) {
      error = std::current_exception();
    }
    letGo();
    if (error) std::rethrow_exception(error);
    return;
  }
  struct Outcome {
    std::atomic<bool> done{false};
    std::exception_ptr error;
  } outcome;
  post([&] {
    try {
      action();
    } catch (...) {
      outcome.error = std::current_exception();
    }
    outcome.done.store(true, std::memory_order_release);
  });
  // The action refers to this frame, so nothing may end the wait before it has run.
  waitUntil([&] { return outcome.done.load(std::memory_order_acquire); }, 0, Interruptible::No);
  if (outcome.error) std::rethrow_exception(outcome.error);
}

void Progress::callAndRunContinuations(const std::function<void()>& action) {
  call([&] {
    ownership_.assertOwned();
    action();
    collectLeftovers();
  });
  runContinuations();
}

void Progress::runBlocking(std::function<void()> action) {
  if (!hasThreads_) return action();
  threads_.runBlocking(std::move(action));
  // A progress thread may be asleep as the owner.
  doorbell_->ringSelf();
}

// --- running ----------------------------------------------------------------------------------------------

bool Progress::turn() {
  const bool advanced = groups_.advance();
  if (advanced) {
    collectLeftovers();
    if (waiters_.any()) waiters_.wake();
  }
  return advanced;
}

void Progress::advanceOnce() {
  ownership_.assertOwned();
  // An operation may have ended when it was submitted. With its continuations collected, its group is idle, and the
  // progress thread need not be woken.
  if (!turn()) collectLeftovers();
}

bool Progress::runTurn() {
  bool advanced = true;
  const bool ran = tryRun([&] {
    ownership_.assertOwned();
    process_->poll();
    advanced = turn();
    if (!advanced) checkHealth();
  });
  return ran && advanced;
}

void Progress::checkHealth() {
  groups_.checkHealth();
  collectLeftovers();
}

void Progress::collectLeftovers() {
  groups_.moveLeftoversTo(leftovers_);
  if (!leftovers_.continuations.empty()) hasContinuations_.store(true);
}

bool Progress::mustLetGo(bool advanced) const {
  const size_t memory = advanced ? kMuchMemory : 1;
  return !leftovers_.continuations.empty() || leftovers_.memory.size() >= memory;
}

void Progress::runUntil(const std::function<bool()>& done, Waiter waiter, Nanoseconds yieldFor) {
  ownership_.assertOwned();
  process::WaitPolicy::IdleWait wait(policy_, waiter, yieldFor);
  const bool isThread = waiter == Waiter::ProgressThread;
  // Set at the first look at the clock. Most waits are too short for one.
  std::optional<Deadline> interrupt;
  const auto isTimeToLetGo = [&] {
    if (isThread) return false;
    if (!interrupt) {
      interrupt = Deadline::after(process_->clock(), process::WaitPolicy::kInterruptPeriod);
    }
    return interrupt->passed(process_->clock());
  };
  for (uint32_t turns = 1;; ++turns) {
    drainInbox();
    const bool advanced = turn();
    if (done() || mustLetGo(advanced)) return;
    // The progress thread lets go for a caller that waits, which pays no hand-over from then on.
    if (isThread && (waiters_.any() || threads_.hasBlocking())) return;
    if (turns % kTurnsPerLook == 0 && isTimeToLetGo()) return;
    if (advanced) {
      wait.reset();
      continue;
    }
    if (wait.spinOrYield()) continue;
    if (policy_.healthCheckDue()) {
      checkHealth();
      if (done() || mustLetGo(/*advanced=*/false) || isTimeToLetGo()) return;
    }
    doorbell_->prepare();
    if (!inbox_.empty() || turn() || done()) {
      doorbell_->cancel();
      continue;
    }
    process_->sleep(policy_.untilHealthCheck(), groups_.isActiveAcrossNodes());
  }
}

void Progress::runUnattendedWork() {
  if (!ownership_.tryAcquire()) return;
  guarded([this] {
    ownership_.assertOwned();
    if (process_->hasFabric() || groups_.checksIdleGroups()) checkHealth();
    groups_.reap();
    collectLeftovers();
    runUntil([this] { return groups_.idle(); }, Waiter::ProgressThread);
  });
  if (mustLetGo(/*advanced=*/false)) threads_.keepOneIdle();
  letGoForContinuations();
  runContinuations();
}

void Progress::letGo() {
  letGoForContinuations();
  // These continuations belong to an operation that has ended since this thread became the owner, or another thread
  // wanted to run them just now.
  if (hasContinuations_.load()) threads_.wakeOne();
}

void Progress::letGoForContinuations() {
  const bool isBusy = !groups_.idle();
  isBusy_.store(isBusy);
  // Freed at the end, when this thread is not the owner.
  const auto memory = std::exchange(leftovers_.memory, {});
  ownership_.letGo();
  if (waiters_.any()) {
    waiters_.wake();
  } else {
    handOver();
  }
  if (!isBusy) policy_.ended();
  // Nobody else takes an action that was pushed while we let go.
  if (inbox_.empty() || !ownership_.tryAcquire()) return;
  guarded([this] {
    ownership_.assertOwned();
    drainInbox();
    turn();
  });
  letGoForContinuations();
}

void Progress::handOver() {
  if (!hasThreads_ || !hasUnattendedWork()) return;
  if (policy_.noteWorkLeft()) threads_.wakeOne();
}

// This thread does not own the engine. A continuation runs the user's code. If it throws, the error is logged, and the
// other continuations run.
bool Progress::runSomeContinuations() {
  if (!ownership_.tryAcquire()) return false;
  const auto ready = std::exchange(leftovers_.continuations, {});
  hasContinuations_.store(false);
  letGoForContinuations();
  for (const auto& action : ready) {
    try {
      action();
    } catch (const std::exception& error) {
      SMDDP_LOG(Warn, "engine", "a callback of a finished operation threw: {}", error.what());
    }
  }
  return true;
}

// --- waiting ----------------------------------------------------------------------------------------------

void Progress::waitUntil(const std::function<bool()>& done, Nanoseconds yieldFor) {
  waitUntil(done, yieldFor, Interruptible::Yes);
}

void Progress::waitUntil(const std::function<bool()>& done, Nanoseconds yieldFor,
                         Interruptible interruptible) {
  callerCameBack();
  bool asked = false;
  std::optional<std::chrono::steady_clock::time_point> nextInterruptCheck;
  while (!done()) {
    const bool ran = tryRun([&] { runUntil(done, Waiter::Caller, yieldFor); });
    if (!ran) {
      waiters_.add();
      // A progress thread that sleeps as the owner lets go when it sees us.
      if (!std::exchange(asked, true)) doorbell_->ringSelf();
      waiters_.sleepUntil([&] { return done() || !ownership_.isTaken(); });
      waiters_.remove();
    }
    if (interruptible == Interruptible::No || done()) continue;
    const auto now = std::chrono::steady_clock::now();
    const bool isTime = nextInterruptCheck && now >= *nextInterruptCheck;
    if (!nextInterruptCheck || isTime) nextInterruptCheck = now + kInterruptTime;
    if (isTime) checkInterrupt();
  }
  handOver();
}

void Progress::complete(calls::Completion& completion, std::optional<Error> error) {
  for (const auto& action : completion.complete(std::move(error))) action();
  wakeWaiters();
}

void Progress::wakeWaiters() {
  // A thread that waits sleeps as the owner or beside it.
  doorbell_->ringSelf();
  waiters_.wake();
}

}  // namespace smddp::engine::progress
