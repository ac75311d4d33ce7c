// Backs off from sched_yield() while another program computes on our core.
//
// A yield to a mate who waits as well, or works for us, is the cheapest way to wait where ranks outnumber cores. A
// yield to a data loader or to another program loses the core for a whole time slice of the scheduler: 3 to 4 ms on
// Linux. An operation has many waits. To sleep and be woken takes a few tens of microseconds, because the scheduler
// prefers threads that wake up to threads that compute. So after a lost time slice the owner does not yield for a
// period. The period doubles each time that the next yield loses one again, and halves with each yield that does not.
//
// Used by the thread that owns the engine.
#pragma once

#include <algorithm>

#include "common/clock.h"

namespace smddp::engine::process {

class YieldBackoff {
 public:
  // Longer than a mate's part of an operation takes, shorter than a time slice of the scheduler.
  static constexpr Nanoseconds kLostSlice = 1'500'000;
  static constexpr Nanoseconds kMinPeriod = 4'000'000;
  static constexpr Nanoseconds kMaxPeriod = 64'000'000;

  // A sched_yield() has taken this time.
  void yielded(Nanoseconds begun, Nanoseconds ended) {
    if (ended - begun < kLostSlice) {
      period_ /= 2;
    } else {
      period_ = std::clamp(2 * period_, kMinPeriod, kMaxPeriod);
      until_ = ended + period_;
    }
  }
  bool avoidsYields(Nanoseconds now) const { return now < until_; }

 private:
  Nanoseconds period_ = 0;
  Nanoseconds until_ = 0;
};

}  // namespace smddp::engine::process
