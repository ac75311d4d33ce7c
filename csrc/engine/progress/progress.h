// Runs what is in flight in an engine. The thread that holds the engine's ownership runs it (docs/threads.md).
//
// A caller that waits becomes the owner and runs everything in flight until its own operation is done, without a
// hand-over to another thread. The progress thread takes over what an asynchronous submitter leaves in flight. A thread
// that finds the engine owned leaves its action in the inbox, which the owner empties at every turn. A turn is one pass
// over everything in flight.
//
// Owns the inbox, the progress threads and the leftovers of operations (ended_operations.h). The thread that completed
// the operation runs continuations, and frees memory, when it has let go of the engine; so continuations may submit and
// wait. To free a tensor may mean to wait for Python's interpreter lock, and a callback of the user may wait for a
// future of torch. That does not run the engine, so a progress thread first makes sure that another one is idle.
//
// Threads: public functions from any thread, except where marked. Ends: stop() joins the progress threads; from then on
// only call() and wakeWaiters() may be used. Errors: an action that throws while the engine runs ends what is in
// flight, and its thread goes on. An exception of the action of call() passes through to its caller.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "common/error.h"
#include "common/ownership.h"
#include "engine/calls/completion.h"
#include "engine/groups/group_registry.h"
#include "engine/process/process.h"
#include "engine/process/wait_policy.h"
#include "engine/progress/inbox.h"
#include "engine/progress/progress_threads.h"
#include "engine/progress/waiters.h"

namespace smddp::engine::progress {

class Progress {
 public:
  using Waiter = process::WaitPolicy::Waiter;

  // Without threads the engine runs only in runTurn() and in callers that wait: for the simulator's tests.
  Progress(Ownership& ownership, process::Process& process, groups::GroupRegistry& groups,
           bool hasThreads);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  // Joins the threads.
  void stop();
  // For the child of a fork, which has none of the threads.
  void forgetThreads() { threads_.forget(); }
  bool hasThreads() const { return hasThreads_; }

  // Becomes the owner, if nobody is, runs `action`, lets go, and runs continuations. False: somebody is the owner.
  template <typename Action>
  bool tryRun(const Action& action);
  // Runs `action` on the owner and returns when it has run.
  void call(const std::function<void()>& action);
  // Calls an action that may end operations; runs their continuations.
  void callAndRunContinuations(const std::function<void()>& action);
  // Runs `action` on the owner, now or later.
  void post(Inbox::Action action);
  // Runs `action` on the owner, now or later, but never on this thread.
  void leaveForOwner(Inbox::Action action);
  // Runs what may block on a progress thread. Without threads it runs at once.
  void runBlocking(std::function<void()> action);
  // One turn, with a health check if nothing advances. True when anything has advanced.
  bool runTurn();

  // A caller comes to wait for its operation, ended or not. Tells the predictor (wait_predictor.h).
  void callerCameBack() { policy_.callerCameBack(); }
  // Waits until `done`. Yields for `yieldFor`, if that is given, before it sleeps. Calls checkInterrupt() now and then,
  // and throws what that throws: then this thread has let go of the engine, and what it waited for goes on.
  void waitUntil(const std::function<bool()>& done, Nanoseconds yieldFor = 0);
  // Finishes a completion that was not given to Engine::submit(), runs its continuations and wakes waiters.
  void complete(calls::Completion& completion, std::optional<Error> error);
  // Makes threads that wait look again at what they wait for.
  void wakeWaiters();
  void runContinuations() {
    while (hasContinuations_.load() && runSomeContinuations()) {
    }
  }

  // The owner: runs what is in flight until `done`, or until continuations must run. A progress thread also stops for a
  // caller that waits and for a blocking action; a caller also stops when it is time to look for signals.
  void runUntil(const std::function<bool()>& done, Waiter waiter, Nanoseconds yieldFor = 0);
  // The owner: does what can be done now.
  void advanceOnce();
  // The owner: after an action that may have ended operations. Else their groups would count as busy.
  void collectLeftovers() SMDDP_REQUIRES(ownership_);
  // The owner, if it runs no continuations: lets go, and frees memory of operations that have ended. Continuations, and
  // what is left in flight, go to the progress thread, unless somebody waits or is about to.
  void letGo() SMDDP_RELEASE(ownership_);

  // For progress threads: whether something is in flight that nobody waits for or runs, and to run it if so.
  bool hasUnattendedWork() const {
    return isBusy_.load() && !waiters_.any() && !ownership_.isTaken();
  }
  bool hasContinuations() const { return hasContinuations_.load(); }
  void runUnattendedWork();

 private:
  friend class WaitScope;
  enum class Interruptible : bool { No, Yes };
  void waitUntil(const std::function<bool()>& done, Nanoseconds yieldFor,
                 Interruptible interruptible);
  void drainInbox() SMDDP_REQUIRES(ownership_);
  bool turn() SMDDP_REQUIRES(ownership_);
  void checkHealth() SMDDP_REQUIRES(ownership_);
  // True if the owner must let go because operations have left continuations or much memory. If nothing has advanced, a
  // little memory is enough.
  bool mustLetGo(bool advanced) const SMDDP_REQUIRES(ownership_);
  // An exception of `action` ends everything in flight: an owner that threw past letGo() would leave everybody waiting.
  template <typename Action>
  void guarded(const Action& action) SMDDP_REQUIRES(ownership_);
  void handOver();
  // letGo() for a thread that runs continuations after it.
  void letGoForContinuations() SMDDP_RELEASE(ownership_);
  bool runSomeContinuations();

  Ownership& ownership_;
  process::Process* process_;  // null after stop()
  const std::shared_ptr<transport::shm::Doorbell> doorbell_;
  groups::GroupRegistry& groups_;
  const bool hasThreads_;
  process::WaitPolicy policy_;
  Inbox inbox_;
  Waiters waiters_;
  std::atomic<bool> isBusy_{false};  // something is in flight, as the last owner left it
  calls::Leftovers leftovers_ SMDDP_GUARDED_BY(ownership_);
  std::atomic<bool> hasContinuations_{false};
  ProgressThreads threads_;
};

// For a caller that waits for several things, one after the other. While this lives, it counts as one that waits, also
// between two waits. Else the end of each wait would wake the progress thread, which would compete with it.
class WaitScope {
 public:
  explicit WaitScope(Progress& progress) : progress_(progress) { progress_.waiters_.add(); }
  ~WaitScope() {
    progress_.waiters_.remove();
    progress_.handOver();
  }
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;

 private:
  Progress& progress_;
};

template <typename Action>
bool Progress::tryRun(const Action& action) {
  if (!ownership_.tryAcquire()) return false;
  guarded([&] {
    ownership_.assertOwned();
    drainInbox();
    action();
  });
  letGoForContinuations();
  runContinuations();
  return true;
}

template <typename Action>
void Progress::guarded(const Action& action) {
  std::optional<Error> failure;
  try {
    action();
  } catch (const Error& error) {
    failure = error;
  } catch (const std::exception& error) {
    failure = Error(ErrorKind::Internal, error.what());
  }
  if (!failure) return;
  groups_.failActive(*failure);
  collectLeftovers();
}

}  // namespace smddp::engine::progress
