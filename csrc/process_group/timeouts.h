// Time-outs of c10d in nanoseconds.
#pragma once

#include <algorithm>
#include <chrono>

#include "common/clock.h"

namespace smddp::process_group {

// Programs that want to wait for ever pass timedelta.max, which is more than 64 bits can count in nanoseconds. A hundred
// years are as good, and a point in time so far away can still be counted.
inline Nanoseconds nanosecondsOf(std::chrono::milliseconds timeout) {
  constexpr std::chrono::hours kLongest(24 * 365 * 100);
  return std::chrono::nanoseconds(std::min<std::chrono::milliseconds>(timeout, kLongest)).count();
}

}  // namespace smddp::process_group
