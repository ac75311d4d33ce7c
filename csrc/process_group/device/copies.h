// The copies of one call between the memory of a device and pinned memory of the host.
//
// They run on a stream of the call, after what the caller's current stream had so far, and before what a stream does
// after wait(). The interface is torch's device-neutral streams and events: nothing here names CUDA, and nothing of it
// is linked.
//
//   constructor       caller    the stream waits for the caller's
//   fetch()           caller    device -> pinned, enqueued
//   seal()            caller    after the last fetch; arrived() is true when the stream has done what came before
//   putBack()         anybody   pinned -> device, enqueued, when the operation has ended; then finish(), once
//   makeStreamWait()  anybody   after finish(): the thread's current stream waits for the copies back
//
// Owns the stream's events, and holds the memory of the call (call_memory.h) until finish(). If a call fails before the
// stream has read its tensors, nobody else gets their memory before it has. An error of the device is an exception of
// torch.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <optional>

#include "common/clock.h"
#include "process_group/call_memory.h"

namespace smddp::process_group::device {

class DeviceCopies {
 public:
  // Throws NotImplementedError while the current stream is captured.
  DeviceCopies(c10::Device device, CallMemoryPtr memory);
  ~DeviceCopies();

  c10::Device device() const { return stream_.device(); }
  c10::Stream stream() const { return stream_; }

  // Pinned memory of the size of a tensor, contiguous; freed blocks are kept for reuse by torch.
  static at::Tensor pinnedLike(const at::Tensor& tensor);
  void fetch(const at::Tensor& from, const at::Tensor& into);
  void seal();
  // Makes arrived() wait for the stream although nothing is fetched. Before seal().
  void awaitStream() { awaitsStream_ = true; }
  bool arrived() const;
  // Blocks until arrived(); false when the deadline has passed.
  bool awaitArrival(Deadline deadline) const;

  void putBack(const at::Tensor& into, const at::Tensor& from);
  // Tells torch's allocator that this stream uses the tensor's memory, which another stream may have allocated.
  void use(const at::Tensor& tensor) const;
  // As seal(), but any number of times: arrived() is about the last one.
  void mark();

  // Nothing more will be enqueued. [thread-safe from here on]
  void finish();
  // Called instead of finish(), after an error of the device: then nobody may wait for the device.
  void abandon() { finished_.store(true, std::memory_order_release); }
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  // Whether the device has done everything.
  bool ended() const { return finished() && end_->query(); }
  // Makes a stream, by default the current one, wait for the copies back.
  void makeStreamWait() const;
  void makeStreamWait(c10::Stream stream) const;
  // The host waits until the device has done everything.
  void synchronize() const { end_->synchronize(); }

 private:
  void letGo();

  const c10::Stream stream_;
  std::optional<c10::Event> arrival_, end_;
  bool awaitsStream_ = false;
  mutable std::atomic<bool> arrived_{false};
  CallMemoryPtr memory_;
  std::atomic<bool> finished_{false};
};

// This thread's current stream of a device.
c10::Stream currentStream(c10::Device device);

// Whether that stream is being captured into a graph. Then nobody may wait for a stream or query it: that ends a
// capture.
bool isCapturing(c10::Device device);

}  // namespace smddp::process_group::device
