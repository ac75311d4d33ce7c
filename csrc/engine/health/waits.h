// Keeps what the operations of one group have waited for, and how long. Asks the awaited ranks, tells mates whom this
// rank blames, and says in the log and on the status board what has waited for long.
//
// Used by the thread that owns the engine.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/clock.h"
#include "engine/calls/in_flight.h"
#include "engine/health/diagnosis.h"
#include "engine/observe/metrics.h"
#include "engine/observe/status_board.h"
#include "engine/process/process.h"
#include "engine/team/membership.h"
#include "engine/team/team.h"

namespace smddp::engine::health {

class Waits {
 public:
  // The arguments outlive this object; `metrics` may be null.
  Waits(process::Process& process, const team::Membership& membership, team::Team& team,
        Diagnosis& diagnosis, observe::StatusBoard::Slot& status, observe::Metrics::Group* metrics);

  // Everything in flight, at each health check.
  void follow(const std::vector<calls::InFlight>& inFlight);
  // When a call last exchanged data, for errors: a call that only needs more time is not stuck.
  std::string progressOf(const calls::InFlight& at) const;

 private:
  // An operation that waits, with all that is known about it.
  struct Wait {
    Nanoseconds since = 0;
    Nanoseconds askedAt = 0;
    bool isReported = false;
    int64_t exchanged = 0;  // InFlight::exchanged, and when it changed
    Nanoseconds exchangedAt = 0;
  };

  // Asks the ranks that one operation awaits.
  void followOne(Wait& wait, const calls::InFlight& at);
  // Says in the log which rank holds up an operation that has waited for long, once.
  void report(Wait& wait, const calls::InFlight& at);
  // Writes to the status board what has waited for long.
  void show(const std::vector<calls::InFlight>& inFlight);

  process::Process& process_;
  const team::Membership& membership_;
  team::Team& team_;
  Diagnosis& diagnosis_;
  observe::StatusBoard::Slot& status_;
  observe::Metrics::Group* const metrics_;  // null: nothing is counted
  std::map<uint64_t, Wait> waits_;          // by sequence
  Nanoseconds messagesAskedAt_ = 0;
  Nanoseconds shownAt_ = 0;
};

}  // namespace smddp::engine::health
