// Stages the tensors of a call on a device (device_call.h): through memory of the host, or where they lie.
//
// Owns the call's stream and copies (copies.h). The tensors belong to the memory of the call (call_memory.h).
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "process_group/call_memory.h"
#include "process_group/device/copies.h"
#include "process_group/device/sources.h"
#include "process_group/device_call.h"

namespace smddp::process_group::device {

// The part that both ways have in common.
class StagedCall : public DeviceCall {
 public:
  StagedCall(c10::Device device, const CallMemoryPtr& memory)
      : memory_(memory), copies_(std::make_shared<DeviceCopies>(device, memory)) {}
  const std::shared_ptr<DeviceCopies>& copies() const { return copies_; }

  void finish(bool well) final;
  void abandon() final { copies_->abandon(); }
  bool ended() const final { return copies_->ended(); }
  c10::Stream stream() const final { return copies_->stream(); }
  void makeStreamWait() const final { copies_->makeStreamWait(); }
  void makeStreamWait(c10::Stream stream) const final { copies_->makeStreamWait(stream); }

 protected:
  const CallMemoryPtr memory_;
  const std::shared_ptr<DeviceCopies> copies_;
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;  // into, from
};

// Copies to pinned memory of the host and back, without waiting for the device. What is only sent leaves from where it
// lies, if the network can read it there (SMDDP_GPU_DIRECT).
class HostStaging final : public StagedCall {
 public:
  // sources: of what the network reads; null: it reads nothing of this call.
  HostStaging(c10::Device device, const CallMemoryPtr& memory, DeviceSources* sources)
      : StagedCall(device, memory), sources_(sources) {}

  engine::calls::Piece place(const at::Tensor& tensor, Access access) override;
  engine::calls::Pieces place(at::TensorList tensors, Access access) override;
  engine::calls::Piece placeCopied(const at::Tensor& from, const at::Tensor& into,
                                   Access access) override;
  std::pair<engine::calls::Pieces, engine::calls::Pieces> placeBlocks(
      const Blocks& sent, const Blocks& received) override;
  bool takesSplits() const override { return false; }

 private:
  // Whether the network can read these tensors where they lie.
  bool canSend(at::TensorList tensors) const;
  // The bytes of a tensor where it lies, in row-major order. Only the network may read them, when the device has
  // computed them.
  engine::calls::Piece sendInPlace(const at::Tensor& tensor);
  // Places a block that this rank gives itself: the plan finds source and destination in one place, and so does not
  // touch them. The device copies it into `into`, before it copies what has come from other ranks.
  engine::calls::Piece giveOwn(const at::Tensor& into, const at::Tensor& own);

  DeviceSources* const sources_;
};

// For calls that are carried out on the device: the bytes that lie there. What is done with them has to be done on the
// stream of the call. A list of tensors becomes one run of bytes.
class DeviceStaging final : public StagedCall {
 public:
  using StagedCall::StagedCall;

  engine::calls::Piece place(const at::Tensor& tensor, Access access) override;
  engine::calls::Pieces place(at::TensorList tensors, Access access) override;
  engine::calls::Piece placeCopied(const at::Tensor& from, const at::Tensor& into,
                                   Access access) override;
  std::pair<engine::calls::Pieces, engine::calls::Pieces> placeBlocks(
      const Blocks& sent, const Blocks& received) override;
  bool takesSplits() const override { return true; }

 private:
  // The tensor, if it is in row-major order; else a copy on the device that is.
  at::Tensor residentOf(const at::Tensor& tensor, Access access);
};

}  // namespace smddp::process_group::device
