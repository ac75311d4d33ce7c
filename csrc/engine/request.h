// One operation, as a value, on its way down from process_group to the engine.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "collectives/collective.h"
#include "common/clock.h"
#include "common/types.h"

namespace smddp::engine {

// Memory that behaves as one run of bytes: one piece usually, several for lists of tensors.
using Pieces = std::vector<std::span<std::byte>>;

inline int64_t totalBytes(const Pieces& pieces) {
  int64_t total = 0;
  for (const auto& piece : pieces) total += static_cast<int64_t>(piece.size());
  return total;
}

// For calls that travel as messages: what the collective is by which all ranks agree to be in the same one.
enum class Agreement : uint8_t { None, AllToAllWithSplits, SparseAllReduce };

// A collective call of this rank. Buffers are laid out as collectives::Shape says.
struct Request {
  collectives::Collective collective = collectives::Collective::Barrier;
  DataType type = DataType::uint8;
  ReduceOp op = ReduceOp::SUM;
  double factor = 1.0;  // PREMUL_SUM
  Rank root = 0;
  int64_t bytes = 0;  // Shape::bytes
  Agreement agreement = Agreement::None;
  Pieces input;  // empty where the call works in place on the output
  Pieces output;
  // The input (the output where the call works in place) is memory of a device that Transport::addDeviceSource() knows.
  // Only puts may read it: what this rank gives itself has to be in place, in the same memory.
  bool inputOnDevice = false;
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
  bool onDevice = false;  // what is sent, as in Request
  Nanoseconds timeout = 0;
  bool willWait = false;
  // A short message to send (Matcher::kShortBytes) goes off at once, and has ended when it has left: whether
  // anybody receives it is not known then. Its receiver keeps it until it is asked for.
  bool buffered = false;
  std::shared_ptr<void> keepAlive;
};

inline constexpr Rank kAnySource = -1;

}  // namespace smddp::engine
