// Time-outs of c10d in nanoseconds.
#pragma once

#include <chrono>

#include "common/clock.h"

namespace smddp::process_group {

// Programs that want to wait for ever pass very long times, which 64 bits cannot count in nanoseconds. A hundred years
// are as good, and a point in time so far away can still be counted. timedelta.max is too long for torch itself, and
// comes as minus 144 years.
inline Nanoseconds nanosecondsOf(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365 * 100);
  const bool isForEver = timeout > kLongest || timeout < -kLongest;
  return std::chrono::nanoseconds(isForEver ? kLongest : timeout).count();
}

}  // namespace smddp::process_group
