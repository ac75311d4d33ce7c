// The operations and messages in flight, as the sentinel of a group sees them.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/types.h"
#include "engine/calls/break.h"
#include "engine/calls/completion.h"
#include "transport/wire.h"

namespace smddp::engine::calls {

// Something that has begun and not ended; with what it waits for, if it waits.
struct InFlight {
  uint64_t sequence = 0;                   // 0: a message; messages are not numbered
  transport::CallFingerprint fingerprint;  // unless it is a message
  std::string wait;           // "at the arrival for ranks 1, 2", "to send to rank 3 with tag 0"
  std::set<Rank> awaited;     // never this rank
  bool awaitsAnyone = false;  // any other rank can end it; then `awaited` is empty
  bool isUnmatched = false;   // a message of which the other rank has not made its call
  int64_t exchanged = 0;      // bytes that it has exchanged with other nodes
  int64_t toExchange = 0;     // … in all
  Nanoseconds usual = 0;      // how long the last executions of the same plan took (median)
  std::optional<Nanoseconds> expired;  // the time-out of its operation whose deadline has passed
};

// Runs on the thread that owns the engine.
class Watched {
 public:
  virtual ~Watched() = default;
  // Everything that has begun and not ended, oldest first. Messages that go the same way are one.
  virtual std::vector<InFlight> inFlight() = 0;
  // Says what the operation of `completion` waits for; nullopt when it is not in flight here.
  virtual std::optional<InFlight> inFlightOf(const Completion& completion) = 0;
  // Ends all operations from broken.firstBroken on, with its cause. Messages have no number: all of them end.
  virtual void endBroken(const Break& broken) = 0;
  // The lowest sequence number in flight; nothing when there is none.
  virtual std::optional<uint64_t> oldest() const = 0;
  // Does what can be done now; true when anything advanced.
  virtual bool advance() = 0;
};

}  // namespace smddp::engine::calls
