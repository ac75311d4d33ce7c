// Shadow memory. For each range of bytes the checker keeps the contents as an expression, the step that wrote them,
// and the steps that have read them since.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "plan/expression.h"
#include "plan/vector_clock.h"

namespace smddp::plan {

// A message in flight. A put uses its source and its target until it is over. It is over for every lane that is
// ordered after one of the moments below.
struct Message {
  VectorClock sent;  // emptied when both ends have finished the execution
  Epoch putAt;
  int64_t length = 0;
  std::vector<Piece> contents;  // emptied at the same time
  std::vector<Epoch> received;  // the first Receive of each lane that covers it
  std::vector<Epoch> flushed;   // the first Flush of each lane that covers it
};

// A step's access to memory. A put goes on with it after the step: see isOver.
struct Access {
  enum class Kind : uint8_t { Step, PutSource, PutTarget };
  Epoch at;
  Kind kind = Kind::Step;
  uint32_t message = 0;  // of a put
};

// True if the access is over for a lane with this clock.
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

// An earlier access that is not ordered before the present one.
struct Conflict {
  Access earlier;
  bool earlierWrites = false;
  int64_t offset = 0;
  int64_t length = 0;
};

// A step that is about to access memory, with the clock of its lane.
struct Accessor {
  Access access;
  const VectorClock& clock;
  const std::vector<Message>& messages;
};

// The shadow of one region of one rank's memory, split wherever an access begins or ends. At first all bytes are
// kUndefined and no step has accessed them.
class ShadowMemory {
 public:
  // Appends the contents of [offset, offset + length) to `pieces`, also if there is a conflict.
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
    std::vector<Access>
        reads;  // reads since the write, without those that another one of them follows
  };
  using Segments = std::map<int64_t, Segment>;

  Segments::iterator splitAt(int64_t offset);
  Segments::iterator cover(int64_t offset, int64_t end);

  Segments segments_;  // without gaps from 0 on
};

// Appends a piece. Merges it with the last one if it continues that.
void append(std::vector<Piece>& pieces, const Piece& piece);

}  // namespace smddp::plan
