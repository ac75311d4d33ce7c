// The requests of process_group to the engine, as values: a collective or a message.
#pragma once

#include <cstddef>
#include <memory>

#include "collectives/collective.h"
#include "common/clock.h"
#include "common/types.h"
#include "engine/calls/pieces.h"

namespace smddp::engine::calls {

// Some calls of the user are made of several collectives. Others are made of messages; a collective beside these shows
// whether all ranks are in the same call. This says which call the collective is part of.
enum class PartOf : uint8_t {
  Itself,
  AllToAllWithSplits,
  SparseAllReduce,
  SplitGroup,
  UnevenAllGather,
  UnevenReduceScatter
};

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
  // The rounding errors of the encodings of these tensors so far, for error feedback. It is as long as the input
  // (collectives::Shape). Null: no feedback. Used only if the call is encoded.
  std::shared_ptr<float[]> residual;
  Nanoseconds timeout = 0;
  // submit() runs the operation and returns when it has ended.
  bool willWait = false;
  // Whatever must stay alive until the operation has ended (tensors). Dropped on the thread that ends it.
  std::shared_ptr<void> keepAlive;
};

// One end of a message between two ranks: a send or a receive. Messages from one rank with one tag are received in the
// order sent.
struct Message {
  bool send = false;
  Rank peer = 0;  // kAnySource: from whoever comes first
  int32_t tag = 0;
  Pieces buffer;
  Nanoseconds timeout = 0;
  // For a send of at most Matcher::kMaxBuffered: it leaves at once, and has ended when it has left, before anybody has
  // received it. The receiver's engine keeps it until a receive asks for it.
  bool buffered = false;
  std::shared_ptr<void> keepAlive;
};

inline constexpr Rank kAnySource = -1;

}  // namespace smddp::engine::calls
