// Turns tensors into the runs of bytes that requests take.
//
// A tensor in row-major order is used where it lies. Any other (strides, a pending conjugation, memory that another
// tensor of the call has, too) is copied: when it is read, before the operation; when it is written, after it. So ranks
// may pass different layouts, and every rank sees the same elements. Tensors on a device are staged by its DeviceCall
// (device_call.h).
//
// The copies belong to the memory of the call (call_memory.h). Threads: filled before the call is submitted; finish()
// once, on the thread that sees the operation's end.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/calls/pieces.h"
#include "process_group/call_memory.h"
#include "process_group/device_call.h"
#include "process_group/overlaps.h"

namespace smddp::process_group {

class DeviceCalls;

inline int64_t numBytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }
inline std::span<std::byte> bytesOf(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

// Whether a tensor's elements lie in memory as requests take them.
bool usableInPlace(const at::Tensor& tensor);

class Staging {
 public:
  Staging() = default;
  explicit Staging(CallMemoryPtr memory) : memory_(std::move(memory)) {}
  // Before the first tensor: what the call is.
  void begin(DeviceCalls& devices, const CallKind& kind) {
    devices_ = &devices;
    kind_ = kind;
  }

  // The bytes that a request uses for a tensor that the call reads, sends to other ranks only, writes, or reads and
  // writes: those of the tensor, or of a copy.
  engine::calls::Piece toRead(const at::Tensor& tensor) { return place(tensor, Access::Read); }
  engine::calls::Piece toSend(const at::Tensor& tensor) { return place(tensor, Access::Send); }
  engine::calls::Piece toWrite(const at::Tensor& tensor) { return place(tensor, Access::Write); }
  engine::calls::Piece toUpdate(const at::Tensor& tensor) { return place(tensor, Access::Update); }
  engine::calls::Pieces toRead(at::TensorList tensors) { return place(tensors, Access::Read); }
  engine::calls::Pieces toWrite(at::TensorList tensors) { return place(tensors, Access::Write); }
  engine::calls::Pieces toUpdate(at::TensorList tensors) { return place(tensors, Access::Update); }
  // For calls that work in place: the bytes of `into`, with the elements of `from` already there. Access::Read, or
  // Access::Send where they only go to other ranks.
  engine::calls::Piece placeCopied(const at::Tensor& from, const at::Tensor& into, Access access);
  // For calls that move blocks: the bytes that are sent, and those that are received. This rank's own block goes from
  // `sent` to `received`.
  std::pair<engine::calls::Pieces, engine::calls::Pieces> placeBlocks(const Blocks& sent,
                                                                      const Blocks& received);
  // Whether one request may have blocks of several sizes; else they are messages.
  bool takesSplits() const { return device_ && device_->takesSplits(); }

  // The device's part of a call on a device; null on the CPU.
  const std::shared_ptr<DeviceCall>& device() const { return device_; }
  // Whether finish() has anything to do.
  bool copiesBack() const { return device_ || !back_.empty(); }
  // After the operation: copies into the tensors that were to be written, if it went well.
  void finish(bool well) const;

 private:
  // `except`: see Overlaps::add().
  engine::calls::Piece place(const at::Tensor& tensor, Access access,
                             const at::Tensor* except = nullptr);
  engine::calls::Pieces place(at::TensorList tensors, Access access);
  // The bytes of a tensor, where it lies or, if it must be copied, in a copy.
  engine::calls::Piece placeAt(const at::Tensor& tensor, Access access, bool mustCopy);
  // Checks that these tensors are on the same device as those before. Null: that is the CPU.
  DeviceCall* deviceCallFor(const at::Tensor& tensor);
  DeviceCall* deviceCallFor(at::TensorList tensors);

  CallMemoryPtr memory_;
  DeviceCalls* devices_ = nullptr;  // outlives the calls that are being described
  CallKind kind_;
  std::shared_ptr<DeviceCall> device_;
  std::optional<c10::Device> tensorDevice_;  // of all tensors so far
  Overlaps overlaps_;
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;  // into, from
};

}  // namespace smddp::process_group
