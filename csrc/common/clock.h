// Clocks: the engine runs on the machine's monotonic clock, or on a simulator's.
#pragma once

#include <ctime>

#include <cstdint>
#include <limits>

namespace smddp {

// Nanoseconds on a clock that never goes back. The origin is arbitrary.
using Nanoseconds = int64_t;
// Users set times in seconds.
constexpr Nanoseconds fromSeconds(int64_t seconds) { return seconds * 1'000'000'000; }

class Clock {
 public:
  virtual ~Clock() = default;
  virtual Nanoseconds now() const = 0;
};

class MonotonicClock final : public Clock {
 public:
  Nanoseconds now() const override {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return fromSeconds(t.tv_sec) + t.tv_nsec;
  }
};

// A point in time at which a wait ends. Every wait has one.
struct Deadline {
  Nanoseconds at = std::numeric_limits<Nanoseconds>::max();
  static Deadline never() { return {}; }
  static Deadline after(const Clock& clock, Nanoseconds duration) {
    const Nanoseconds now = clock.now();
    return {duration > std::numeric_limits<Nanoseconds>::max() - now ? never().at : now + duration};
  }
  bool passed(const Clock& clock) const { return clock.now() >= at; }
};

}  // namespace smddp
