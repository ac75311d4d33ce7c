// std::mutex, its lock and its condition variable, with annotations for clang's thread-safety analysis
// (thread_annotations.h). Those of libstdc++ have none.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "common/thread_annotations.h"

namespace smddp {

class SMDDP_CAPABILITY("mutex") Mutex {
 public:
  void lock() SMDDP_ACQUIRE() { mutex_.lock(); }
  void unlock() SMDDP_RELEASE() { mutex_.unlock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds a mutex in its scope, except between unlock() and lock().
class SMDDP_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) SMDDP_ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  ~MutexLock() SMDDP_RELEASE() {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  void lock() SMDDP_ACQUIRE() { lock_.lock(); }
  void unlock() SMDDP_RELEASE() { lock_.unlock(); }

 private:
  friend class ConditionVariable;
  std::unique_lock<std::mutex> lock_;
};

// Its waits take no predicate, because a lambda could not touch fields that the mutex guards. Write a loop:
//   while (!ready_) changed_.wait(lock);
class ConditionVariable {
 public:
  void notifyOne() { changed_.notify_one(); }
  void notifyAll() { changed_.notify_all(); }
  void wait(MutexLock& lock) { changed_.wait(lock.lock_); }
  // Wait at most for this duration, or until this time.
  void waitFor(MutexLock& lock, std::chrono::nanoseconds time) {
    changed_.wait_for(lock.lock_, time);
  }
  void waitUntil(MutexLock& lock, std::chrono::steady_clock::time_point time) {
    changed_.wait_until(lock.lock_, time);
  }

 private:
  std::condition_variable changed_;
};

}  // namespace smddp
