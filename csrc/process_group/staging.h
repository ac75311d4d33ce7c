// Tensors as the runs of bytes that requests want.
//
// A tensor in row-major order is used where it lies. Any other (strides, a pending conjugation) is copied: on
// the way in when it is read, on the way out when the operation has ended. So ranks may pass different layouts, and
// every rank sees the same elements. A tensor on a device is copied, through pinned memory and without waiting for the
// device (device_copies.h), but for what the network reads there by itself, see readInPlace(); unless the call is carried
// out there, see stayOnDevice().
//
// Owns the copies, and a share of the tensors that are read in place, until it is dropped. Threads: filled before the
// call is submitted; finish() on whichever thread sees the operation's end, once.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/request.h"
#include "process_group/device_copies.h"

namespace smddp::process_group {

inline int64_t numBytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// Whether a tensor's elements lie as requests want them.
bool usableInPlace(const at::Tensor& tensor);

class Staging {
 public:
  // The bytes of a tensor that is read, written, or both.
  engine::Piece read(const at::Tensor& tensor);
  engine::Piece write(const at::Tensor& tensor);
  engine::Piece update(const at::Tensor& tensor);
  // Of several; one piece where the call stays on their device.
  engine::Pieces read(const std::vector<at::Tensor>& tensors);
  engine::Pieces write(const std::vector<at::Tensor>& tensors);
  engine::Pieces update(const std::vector<at::Tensor>& tensors);
  // For calls that work in place: the bytes of `into`, with the elements of `from` already there.
  engine::Piece readThrough(const at::Tensor& from, const at::Tensor& into);

  // The bytes of tensors where they lie on a device, in row-major order: only the network may read them, when the device has
  // come to the call.
  engine::Piece readInPlace(const at::Tensor& tensor);
  engine::Pieces readInPlace(at::TensorList tensors);
  // As write() of several, but one of them gets its elements from `own`, which stays on the device, and so does its
  // piece: where a plan copies what this rank gives itself, source and destination are the same, and nobody touches them
  // (Executor::move). The copy is made on the device, before what has come from others is copied.
  engine::Pieces writeAround(at::TensorList tensors, size_t mine, const at::Tensor& own);
  // The same within a tensor, from its element `begin` on.
  engine::Pieces writeAround(const at::Tensor& tensor, int64_t begin, const at::Tensor& own);

  // Keeps a tensor of the operation's own, such as a message that nobody passed in.
  at::Tensor keep(at::Tensor tensor);

  // From now on the bytes of tensors on a device are those that lie there. What is done with them has to be done on the
  // stream of device().
  void stayOnDevice() { staysOnDevice_ = true; }
  bool staysOnDevice() const { return staysOnDevice_; }

  // Of a call on a device; null on the CPU.
  const std::shared_ptr<DeviceCopies>& device() const { return device_; }
  // Whether finish() has anything to do.
  bool copiesBack() const { return device_ || !back_.empty(); }
  // After the operation: copies into the tensors that were to be written, if it went well.
  void finish(bool well) const;
  const std::vector<at::Tensor>& kept() const { return kept_; }

 private:
  // All tensors of a call are in one place. Whether that is a device.
  bool onDevice(const at::Tensor& tensor);
  // The tensor, or a copy in row-major order, with its elements or to be given some.
  at::Tensor residentOf(const at::Tensor& tensor, bool reads);
  bool joins(const std::vector<at::Tensor>& tensors);
  // The elements of all tensors, one behind the other, on the device where they are.
  engine::Piece joined(const std::vector<at::Tensor>& tensors, bool reads, bool writes);

  bool staysOnDevice_ = false;
  std::shared_ptr<DeviceCopies> device_;
  std::optional<c10::Device> place_;
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;  // into, from
};

}  // namespace smddp::process_group
