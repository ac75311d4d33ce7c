// Ownership of an object and of all that belongs to it. One thread at a time holds it: a lock for which nobody waits.
//
// Each engine has one. The thread that holds it runs the engine and may touch its groups, channels, transports and
// peers, which have no locks. A thread that does not get it leaves its request to the owner (docs/threads.md).
//
// How to use it in a class that only the owner touches:
//   * keep a reference to the Ownership, or to an object that has one (Process::ownership());
//   * begin each function through which other code enters the class with ownership.assertOwned(). Functions that only
//     these call need not repeat it. It ends the process, with file, line and function of the caller, unless the
//     calling thread is the owner. It costs nothing in builds other than Debug and those under sanitizers
//     (SMDDP_CHECK_OWNERSHIP), so it may stand on the fastest path;
//   * mark fields SMDDP_GUARDED_BY(ownership_) and private functions SMDDP_REQUIRES(ownership_) where the Ownership is
//     a member. `make tidy` then refuses code that reaches them without tryAcquire() or assertOwned() before. A lambda
//     that the owner runs later begins with assertOwned(), too.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "common/thread_annotations.h"

#ifndef SMDDP_CHECK_OWNERSHIP
#define SMDDP_CHECK_OWNERSHIP 0
#endif

namespace smddp {

class SMDDP_CAPABILITY("ownership") Ownership {
 public:
  Ownership() = default;
  Ownership(const Ownership&) = delete;
  Ownership& operator=(const Ownership&) = delete;

  // The new owner sees all stores of the last one. Loads first, because a failed exchange takes the cache line.
  bool tryAcquire() SMDDP_TRY_ACQUIRE(true) {
    if (taken_.load(std::memory_order_relaxed) || taken_.exchange(true, std::memory_order_acquire))
      return false;
#if SMDDP_CHECK_OWNERSHIP
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
#endif
    return true;
  }
  // Sequentially consistent: after the release the last owner checks for waiters and requests; a thread that waits or
  // leaves a request then checks for an owner. One of the two sees the other.
  void letGo() SMDDP_RELEASE() {
#if SMDDP_CHECK_OWNERSHIP
    assertOwned();
    owner_.store({}, std::memory_order_relaxed);
#endif
    taken_.store(false);
  }
  // Any thread may call it. Only for the owner does the answer stay valid.
  bool isTaken() const { return taken_.load(); }

#if SMDDP_CHECK_OWNERSHIP
  void assertOwned(const char* file = __builtin_FILE(), int line = __builtin_LINE(),
                   const char* function = __builtin_FUNCTION()) const
      SMDDP_ASSERT_CAPABILITY(this) {
    if (owner_.load(std::memory_order_relaxed) == std::this_thread::get_id()) return;
    // Not an exception: exceptions in operations are caught, and end the operation only.
    std::fprintf(stderr, "smddp: %s:%d: %s() runs on a thread that does not own the engine\n", file,
                 line, function);
    std::abort();
  }
#else
  void assertOwned() const SMDDP_ASSERT_CAPABILITY(this) {}
#endif

 private:
  std::atomic<bool> taken_{false};
#if SMDDP_CHECK_OWNERSHIP
  std::atomic<std::thread::id> owner_;
#endif
};

}  // namespace smddp
