// Ownership of an object and of all below it, which one thread at a time holds: a lock that nobody waits for.
//
// An engine has one. Whoever holds it runs the engine and may touch its groups, channels, transports and peers; these
// have no locks. Who does not get it leaves his request to the owner instead (docs/threads.md).
//
// How to use it in a class that only the owner touches:
//   * keep a reference to the Ownership, or to an object that has one (Process::ownership());
//   * begin each public function that only the owner may call with ownership.assertOwned(). It ends the process, with
//     file, line and function of the caller, unless the calling thread is the owner. It costs nothing in builds other
//     than Debug and those under sanitizers (SMDDP_CHECK_OWNERSHIP), so it may stand on the fastest path;
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

  // What the last owner did is visible to the next one. Looks first, because a failed exchange takes the cache line.
  bool tryAcquire() SMDDP_TRY_ACQUIRE(true) {
    if (taken_.load(std::memory_order_relaxed) || taken_.exchange(true, std::memory_order_acquire))
      return false;
#if SMDDP_CHECK_OWNERSHIP
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
#endif
    return true;
  }
  // Sequentially consistent: who lets go looks afterwards whether anybody waits or has left a request, and who waits or
  // leaves one looks afterwards whether anybody is the owner. One of the two sees the other.
  void release() SMDDP_RELEASE() {
#if SMDDP_CHECK_OWNERSHIP
    assertOwned();
    owner_.store({}, std::memory_order_relaxed);
#endif
    taken_.store(false);
  }
  // By any thread; true of the next moment only for the owner.
  bool isTaken() const { return taken_.load(); }

#if SMDDP_CHECK_OWNERSHIP
  void assertOwned(const char* file = __builtin_FILE(), int line = __builtin_LINE(),
                   const char* function = __builtin_FUNCTION()) const
      SMDDP_ASSERT_CAPABILITY(this) {
    if (owner_.load(std::memory_order_relaxed) == std::this_thread::get_id()) return;
    // Not an exception: those of operations are caught, and end only the operation.
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
