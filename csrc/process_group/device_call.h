// The tensors of one call that are on a device, as Staging and Work see them. csrc/process_group/device has what is
// behind this interface.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/calls/request.h"

namespace smddp::process_group {

// The facts about a call that are needed before its first tensor is staged.
struct CallKind {
  static constexpr Rank kNobody = -1;
  std::optional<collectives::Collective> collective;  // none: a message
  ReduceOp op = ReduceOp::SUM;                        // of reductions
  Rank receiver = kNobody;                            // of a message that this rank sends

  static CallKind send(Rank receiver) { return {std::nullopt, ReduceOp::SUM, receiver}; }
  static CallKind receive() { return {}; }
};

// How a call uses the bytes of a tensor.
enum class Access : uint8_t {
  Read,
  Send,  // reads them for other ranks only
  Write,
  Update,  // reads and writes them
};
constexpr bool reads(Access access) { return access != Access::Write; }
constexpr bool writes(Access access) { return access == Access::Write || access == Access::Update; }

// The tensors of a call that has one block for each rank. Seen as one vector, one tensor behind the other, this rank's
// own block is the `count` elements from element `begin` on.
struct Blocks {
  at::TensorList tensors;
  int64_t begin = 0;
  int64_t count = 0;
};

// Threads: place(), placeCopied() and placeBlocks() on the thread that makes the call, before it submits it; finish()
// once, on the thread that sees the operation's end; after that any thread. What it stages belongs to the memory
// of the call (call_memory.h). A device that fails throws.
class DeviceCall {
 public:
  virtual ~DeviceCall() = default;

  // As Staging's functions: where a request finds the bytes of these tensors.
  virtual engine::calls::Piece place(const at::Tensor& tensor, Access access) = 0;
  virtual engine::calls::Pieces place(at::TensorList tensors, Access access) = 0;
  virtual engine::calls::Piece placeCopied(const at::Tensor& from, const at::Tensor& into,
                                           Access access) = 0;
  virtual std::pair<engine::calls::Pieces, engine::calls::Pieces> placeBlocks(
      const Blocks& sent, const Blocks& received) = 0;
  // Whether one request may have blocks of several sizes.
  virtual bool takesSplits() const = 0;

  // After the operation: enqueues the copies into the tensors that were to be written, if it went well.
  virtual void finish(bool well) = 0;
  // Called instead of finish(), after an error of the device: then nobody waits for the device.
  virtual void abandon() = 0;
  // Whether the device has done everything.
  virtual bool ended() const = 0;
  // The stream on which the call's copies are enqueued.
  virtual c10::Stream stream() const = 0;
  // A stream, by default the thread's current one, waits for the end of the call.
  virtual void makeStreamWait() const = 0;
  virtual void makeStreamWait(c10::Stream stream) const = 0;
};

}  // namespace smddp::process_group
