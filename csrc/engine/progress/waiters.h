// Threads that wait for an operation, and how the owner wakes those of them that are not the owner.
//
// Threads: all functions from any thread. Ends with the engine, when nobody waits any more.
#pragma once

#include <atomic>

#include "common/mutex.h"
#include "engine/process/wait_policy.h"

namespace smddp::engine::progress {

class Waiters {
 public:
  void add() { count_.fetch_add(1); }
  void remove() { count_.fetch_sub(1); }
  bool any() const { return count_.load() > 0; }

  // Something has advanced, or the owner has let go: threads that wait look again.
  void wake() {
    const MutexLock lock(mutex_);
    changed_.notifyAll();
  }
  // Sleeps until `ready` holds after a wake-up, for at most kWaiterPoll. The caller has called add() before.
  template <typename Ready>
  void sleepUntil(const Ready& ready) {
    const auto end = std::chrono::steady_clock::now() + process::WaitPolicy::kWaiterPoll;
    MutexLock lock(mutex_);
    while (!ready() && std::chrono::steady_clock::now() < end) changed_.waitUntil(lock, end);
  }

 private:
  std::atomic<int> count_{0};
  Mutex mutex_;
  ConditionVariable changed_;
};

}  // namespace smddp::engine::progress
