// One operation, as a value, on its way down from process_group to the engine.
#pragma once

#include <cstddef>
#include <memory>

#include "collectives/collective.h"
#include "common/clock.h"
#include "common/types.h"
#include "engine/pieces.h"

namespace smddp::engine {

// Some calls of the user travel as messages, and beside them as a collective by which all ranks find out whether they
// are in the same call. This is what that collective is part of.
enum class PartOf : uint8_t { Itself, AllToAllWithSplits, SparseAllReduce, SplitGroup };

// A collective call of this rank. Buffers are laid out as collectives::Shape says.
struct Request {
  collectives::Collective collective = collectives::Collective::Barrier;
  DataType type = DataType::uint8;
  ReduceOp op = ReduceOp::SUM;
  double factor = 1.0;  // PREMUL_SUM
  Rank root = 0;
  int64_t bytes = 0;  // Shape::bytes
  PartOf partOf = PartOf::Itself;
  Pieces input;  // empty where the call works in place on the output
  Pieces output;
  Nanoseconds timeout = 0;
  // The caller waits for the result right after submitting: it may as well run the operation itself.
  bool willWait = false;
  // Whatever must stay alive until the operation has ended (tensors). Dropped on the thread that ends it.
  std::shared_ptr<void> keepAlive;
};

// A message between two ranks. Messages from one rank with one tag are received in the order sent.
struct Message {
  bool send = false;
  Rank peer = 0;  // kAnySource: from whoever comes first
  int32_t tag = 0;
  Pieces buffer;
  Nanoseconds timeout = 0;
  bool willWait = false;
  // A short message to send (Matcher::kShortBytes) goes off at once, and has ended when it has left: whether
  // anybody receives it is not known then. Its receiver keeps it until it is asked for.
  bool buffered = false;
  std::shared_ptr<void> keepAlive;
};

inline constexpr Rank kAnySource = -1;

}  // namespace smddp::engine
