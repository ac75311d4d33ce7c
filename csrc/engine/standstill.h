// What the sentinel of a group sees of the operations and messages in flight.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/types.h"
#include "engine/break.h"
#include "engine/completion.h"
#include "transport/wire.h"

namespace smddp::engine {

// Something that is in flight and waits for other ranks.
struct Standstill {
  uint64_t sequence = 0;            // 0: a message; messages are not numbered
  transport::CallFingerprint call;  // unless it is a message
  std::string wait;           // "at the arrival for ranks 1, 2", "to send to rank 3 with tag 0"
  std::set<Rank> awaited;     // never this rank
  bool awaitsAnyone = false;  // any other rank can end it; then `awaited` is empty
  int64_t moved = 0;          // bytes that it has exchanged with other nodes
  int64_t toMove = 0;         // … in all
  std::optional<Nanoseconds> expired;  // the time-out of its operation whose deadline has passed
};

// Runs on the thread that owns the engine.
class Watched {
 public:
  virtual ~Watched() = default;
  // Everything that has begun and not ended, oldest first.
  virtual std::vector<Standstill> standstills() = 0;
  // What the operation of `completion` waits for; nothing when it is not in flight here.
  virtual std::optional<Standstill> standstillOf(const Completion& completion) = 0;
  // Ends what the break concerns with the cause of the break.
  virtual void endFrom(const Break& broken) = 0;
  // The lowest sequence number in flight; nothing when there is none.
  virtual std::optional<uint64_t> oldest() const = 0;
  // Does what can be done now; true when anything advanced.
  virtual bool advance() = 0;
};

}  // namespace smddp::engine
