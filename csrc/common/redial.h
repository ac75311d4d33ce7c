// Whether and when to connect again, after an attempt that has failed.
#pragma once

#include <cerrno>
#include <optional>

#include "common/clock.h"

namespace smddp {

// Says when to try again to connect to one peer. A link or a route that is missing may come back, so a short
// interruption costs time only.
class Redial {
 public:
  // When to make the next attempt. Nothing if `error` is not about the way to the peer, or if there has been none since
  // attempts began to fail, at least `limit` ago.
  std::optional<Deadline> after(int error, const Clock& clock, Nanoseconds limit) {
    constexpr Nanoseconds kPeriod = 250'000'000;
    if (error != ENETUNREACH && error != EHOSTUNREACH && error != ENETDOWN && error != EHOSTDOWN)
      return std::nullopt;
    const Nanoseconds now = clock.now();
    if (!failingSince_) failingSince_ = now;
    if (now - *failingSince_ >= limit) return std::nullopt;
    return Deadline::after(clock, kPeriod);
  }

 private:
  std::optional<Nanoseconds> failingSince_;
};

}  // namespace smddp
