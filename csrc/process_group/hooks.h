// Functions that torch's tools register on a group: its Flight Recorder wants to know when a call has ended, and dumps
// what it has seen when one fails (torch's Hooks.hpp).
//
// They run on a thread of their own, so that no call ends later because of them, and a failure reaches callers and the
// log first: a dump may take seconds, in which it holds Python's interpreter lock again and again.
//
// Threads: any. No lock is held while a function runs. One that is removed while it runs ends its run. What one throws
// is logged: it is not the fault of the call.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/log.h"
#include "common/mutex.h"

namespace smddp::process_group {

template <typename... Arguments>
class HookList {
 public:
  using Hook = std::function<void(Arguments...)>;

  void add(int64_t id, Hook hook) {
    change([&](Hooks& hooks) { hooks[id] = std::move(hook); });
  }
  void remove(int64_t id) {
    change([&](Hooks& hooks) { hooks.erase(id); });
  }
  bool empty() const { return isEmpty_.load(std::memory_order_relaxed); }
  void run(Arguments... arguments) const {
    runIf([](const Hook&) { return true; }, arguments...);
  }
  template <typename Condition>
  void runIf(Condition condition, Arguments... arguments) const {
    if (empty()) return;
    const auto hooks = hooks_.load();
    for (const auto& [id, hook] : *hooks) {
      if (!condition(hook)) continue;
      try {
        hook(arguments...);
      } catch (const std::exception& error) {
        SMDDP_LOG(Warn, "process_group", "a hook has failed: {}", error.what());
      }
    }
  }

 private:
  using Hooks = std::map<int64_t, Hook>;
  // Hooks that run see the old list, so the change is made to a copy.
  template <typename Change>
  void change(Change apply) {
    const std::lock_guard lock(mutex_);
    auto changed = std::make_shared<Hooks>(*hooks_.load());
    apply(*changed);
    isEmpty_.store(changed->empty(), std::memory_order_relaxed);
    hooks_.store(std::move(changed));
  }

  std::mutex mutex_;  // of changes
  std::atomic<std::shared_ptr<const Hooks>> hooks_{std::make_shared<const Hooks>()};
  std::atomic<bool> isEmpty_{true};
};

// The hooks of one group.
struct Hooks {
  // A call has ended without an error: Work::completionKey(), and the milliseconds that it took.
  HookList<uint64_t, float> completion;
  // The group has failed, or was aborted.
  HookList<> abort;
  std::atomic<bool> hasFailed{false};  // the latter have been given to the thread
};

// The thread that runs the hooks of all groups of this process ("smddp-hooks"). Starts with the first hook that is to
// run.
//
// Hooks for a failure begin a second after it, when the caller has its error and has said it; or when the process ends,
// in waitForAll(). The hooks that need no lock of Python run at once: torch's health check hears of the failure, and
// the Flight Recorder writes what it can.
class HookThread {
 public:
  // Never destroyed, because its thread may outlive main(). A child of fork() has another one.
  static HookThread& ofThisProcess();
  // Its name for the system. Threads that a hook starts inherit it.
  static constexpr const char* kName = "smddp-hooks";

  void callEnded(std::shared_ptr<const Hooks> hooks, uint64_t key, float milliseconds);
  // Only the first call for a group has an effect. If a signal has interrupted this rank, its hooks do not run, because
  // somebody wants the process to end.
  void groupFailed(const std::shared_ptr<Hooks>& hooks, bool wasInterrupted);
  // Returns when the calls that have ended are known to their hooks; waits for no hook of a failure.
  void waitForCalls();
  // Returns when all hooks have run; false after SMDDP_DUMP_SECONDS, or at once if a signal has ended a wait before.
  // Throws what checkInterrupt() throws.
  bool waitForAll();

 private:
  struct Ended {
    std::shared_ptr<const Hooks> hooks;
    uint64_t key;
    float milliseconds;
  };
  struct Failed {
    std::shared_ptr<const Hooks> hooks;  // null: none is to run
    Nanoseconds since;
    bool isBegun = false;  // what comes at once has been done
  };

  HookThread();
  // False if there is no thread: the caller runs the hooks.
  bool isStarted() SMDDP_REQUIRES(mutex_);
  // A thread in waitForAll() waits no longer, and later ones do not wait.
  void giveUp() SMDDP_REQUIRES(mutex_);
  void loop();
  void runEnded(MutexLock& lock) SMDDP_REQUIRES(mutex_);
  // Runs the quick hooks of one failed group, and writes the dump without stacks; false if no group is left for that.
  bool beginFailed(MutexLock& lock) SMDDP_REQUIRES(mutex_);
  void runFailed(MutexLock& lock) SMDDP_REQUIRES(mutex_);

  const uint32_t forkCount_;
  const MonotonicClock clock_;
  Mutex mutex_;
  ConditionVariable changed_;  // there is something to do, or somebody waits for it
  ConditionVariable idle_;
  bool hasThread_ SMDDP_GUARDED_BY(mutex_) = false;
  bool isParked_ SMDDP_GUARDED_BY(mutex_) = false;
  bool isRunning_ SMDDP_GUARDED_BY(mutex_) = false;
  bool isGivenUp_ SMDDP_GUARDED_BY(mutex_) = false;  // see waitForAll()
  int waiting_ SMDDP_GUARDED_BY(mutex_) = 0;         // threads in waitForAll()
  std::vector<Ended> ended_ SMDDP_GUARDED_BY(mutex_);
  std::deque<Failed> failed_ SMDDP_GUARDED_BY(mutex_);
};

}  // namespace smddp::process_group
