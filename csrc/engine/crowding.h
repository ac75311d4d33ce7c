// Whether somebody who computes shares our core, so that to yield gives a whole turn away.
//
// A yield to a mate who waits as well, or works for us, is the cheapest way to wait where ranks outnumber cores. One to
// a data loader or to another program costs 3 to 4 ms on Linux's schedulers, and an operation has many waits. To sleep
// and be woken takes some ten microseconds: who wakes comes before who computes. So after such a lost turn we do
// without yields for a while, for longer each time the next try is lost again.
//
// Used by the thread that owns the engine.
#pragma once

#include <algorithm>

#include "common/clock.h"

namespace smddp::engine {

class Crowding {
 public:
  // Longer than a mate's share of an operation takes, shorter than the turns of the scheduler.
  static constexpr Nanoseconds kLostTurn = 1'500'000;
  static constexpr Nanoseconds kMinPeriod = 4'000'000;
  static constexpr Nanoseconds kMaxPeriod = 64'000'000;

  // Of a sched_yield().
  void yielded(Nanoseconds begun, Nanoseconds ended) {
    if (ended - begun < kLostTurn) {
      period_ /= 2;
    } else {
      period_ = std::clamp(2 * period_, kMinPeriod, kMaxPeriod);
      until_ = ended + period_;
    }
  }
  bool isCrowded(Nanoseconds now) const { return now < until_; }

 private:
  Nanoseconds period_ = 0;
  Nanoseconds until_ = 0;
};

}  // namespace smddp::engine
