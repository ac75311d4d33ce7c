// The copies of one call between the memory of a device and pinned memory of the host.
//
// They run on a stream of the call's own, behind what the caller's current stream had so far, and before what a
// stream does that wait() was called for. torch's device-neutral streams and events are the interface: nothing
// here names CUDA, and nothing of it is linked.
//
//   constructor   caller    the stream waits for the caller's
//   fetch()       caller    device -> pinned, enqueued
//   seal()        caller    after the last fetch; arrived() tells of what came before
//   putBack()     anybody   pinned -> device, enqueued, when the operation has ended; then finish(), once
//   order()       anybody   after finish(): the thread's current stream waits for the copies back
//
// Owns the stream's events, and until finish() a share of the tensors that fetch() reads: of a call that fails before they
// are read the memory is not given to anybody else until then. An error of the device is an exception of torch.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <optional>
#include <vector>

#include "common/clock.h"

namespace smddp::process_group::device {

class DeviceCopies {
 public:
  // Throws NotImplementedError while the current stream is captured.
  explicit DeviceCopies(c10::Device device);
  ~DeviceCopies();

  c10::Device device() const { return stream_.device(); }
  c10::Stream stream() const { return stream_; }

  // Pinned memory of the size of a tensor, contiguous; freed blocks are kept for reuse by torch.
  static at::Tensor pinnedLike(const at::Tensor& tensor);
  void fetch(const at::Tensor& from, const at::Tensor& into);
  void seal();
  // arrived() will tell, of what comes before seal(), although nothing is fetched.
  void awaitStream() { awaitsStream_ = true; }
  bool arrived() const;
  // Blocks until then; false when the deadline has passed.
  bool awaitArrival(Deadline deadline) const;

  void putBack(const at::Tensor& into, const at::Tensor& from);
  // For calls that are carried out on the device: the stream uses the tensor's memory, wherever it was allocated.
  void use(const at::Tensor& tensor) const;
  // The same as seal(), any number of times: arrived() tells of the last.
  void mark();

  // Nothing follows. [thread-safe from here on]
  void finish();
  // Instead, after an error of the device: nobody is to wait for it.
  void abandon() { finished_.store(true, std::memory_order_release); }
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  // Whether the device has done everything.
  bool ended() const { return finished() && end_->query(); }
  // A stream, by default the current one, waits for the copies back.
  void order() const;
  void order(c10::Stream stream) const;
  // The host waits until the device has done everything.
  void synchronize() const { end_->synchronize(); }

 private:
  void letGo();

  const c10::Stream stream_;
  std::optional<c10::Event> arrival_, end_;
  bool awaitsStream_ = false;
  mutable std::atomic<bool> arrived_{false};
  std::vector<at::Tensor> fetched_;
  std::atomic<bool> finished_{false};
};

// The stream on which this thread's work for a device goes.
c10::Stream currentStream(c10::Device device);

// Whether that is being captured into a graph, which would be spoilt by whatever waits or asks how far a stream is.
bool isCapturing(c10::Device device);

}  // namespace smddp::process_group::device
