// What the checker remembers about a piece of memory: its contents as expressions, who wrote them, who read
// them since.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "plan/expression.h"
#include "plan/vector_clock.h"

namespace smddp::plan {

// A message under way. A put touches memory until somebody knows that it is over: whoever is ordered after
// one of these moments does.
struct Message {
  VectorClock sent;  // emptied when both ends have ended the execution
  Epoch putAt;
  int64_t length = 0;
  std::vector<Epoch> received;  // the first Receive of each lane that covers it
  std::vector<Epoch> flushed;   // the first Flush of each lane that covers it
};

// A step that touched memory, and how long it may still do so.
struct Access {
  enum class Kind : uint8_t { Step, PutSource, PutTarget };
  Epoch at;
  Kind kind = Kind::Step;
  uint32_t message = 0;  // of a put
};

// Is the access over for somebody with this clock?
inline bool isOver(const Access& access, const VectorClock& clock,
                   const std::vector<Message>& messages) {
  if (access.kind == Access::Kind::Step) return clock.includes(access.at);
  const Message& message = messages[access.message];
  for (const Epoch& e : message.received) {
    if (clock.includes(e)) return true;
  }
  if (access.kind == Access::Kind::PutSource) {
    for (const Epoch& e : message.flushed) {
      if (clock.includes(e)) return true;
    }
  }
  return false;
}

// A run of bytes that holds one expression at consecutive positions.
struct Piece {
  int64_t length = 0;
  Term value;
};

// An earlier access that nothing orders before the present one.
struct Conflict {
  Access earlier;
  bool earlierWrites = false;
  int64_t offset = 0;
  int64_t length = 0;
};

// Somebody about to touch memory.
struct Accessor {
  Access access;
  const VectorClock& clock;
  const std::vector<Message>& messages;
};

// One region of memory of one rank, split wherever an access begins or ends. Created empty: kUndefined
// everywhere, touched by nobody.
class ShadowMemory {
 public:
  // Appends what [offset, offset + length) holds to `pieces`; runs on even when there is a conflict.
  std::optional<Conflict> read(int64_t offset, int64_t length, const Accessor& by,
                               std::vector<Piece>& pieces);
  // The pieces' lengths add up to `length`.
  std::optional<Conflict> write(int64_t offset, int64_t length, const Accessor& by,
                                const std::vector<Piece>& pieces);

 private:
  struct Segment {
    int64_t end = 0;
    Term value;
    Access write;
    std::vector<Access> reads;  // since the write, those that no other one of them follows
  };
  using Segments = std::map<int64_t, Segment>;

  Segments::iterator splitAt(int64_t offset);
  Segments::iterator cover(int64_t offset, int64_t end);

  Segments segments_;  // without gaps from 0 on
};

// Appends a piece, as part of the last one when it continues it.
void append(std::vector<Piece>& pieces, const Piece& piece);

}  // namespace smddp::plan
