// The interface to calls on tensors of a device: all that the other files of this folder know of them. It is
// implemented in csrc/process_group/device.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <span>

#include "engine/engine.h"
#include "engine/progress/deferred_calls.h"
#include "process_group/work.h"

namespace smddp::process_group {

// The calls of one group that are on a device, and those on the CPU that were made behind them.
//
// Threads: any. Belongs to a group, and is closed with it. An error ends the call that meets it, as on the CPU.
class DeviceCalls {
 public:
  virtual ~DeviceCalls() = default;
  // Called before the first call, and again when the members of the group have changed.
  void attach(std::shared_ptr<engine::Engine> engine, std::shared_ptr<engine::groups::Group> group);
  // Makes such an object for a group that split() makes of some of the ranks.
  virtual std::unique_ptr<DeviceCalls> forSplit() const = 0;

  // Makes the object that stages the tensors of a call, of which `first` is one, into its memory.
  virtual std::shared_ptr<DeviceCall> begin(const CallKind& kind, const at::Tensor& first,
                                            const CallMemoryPtr& memory) = 0;
  // Carries out a call on the device, or hands it to the engine when the device has filled its buffers.
  virtual c10::intrusive_ptr<Work> submit(Work::Call call,
                                          std::span<engine::calls::Request> requests,
                                          std::span<engine::calls::Message> messages) = 0;
  // Blocks until the device has done what this thread's current stream has so far, and until the group's collectives on
  // the device have ended.
  virtual void synchronize() = 0;

  // Whether calls wait for a device: what comes now has to queue behind them.
  bool busy() const { return deferred_.busy(); }
  // Blocks until every call made so far has begun.
  void drain() { deferred_.drain(); }
  // Ends the calls that have not begun, and all later ones.
  void close(const Error& error) { deferred_.close(error); }

 protected:
  std::shared_ptr<engine::Engine> engine_;
  std::shared_ptr<engine::groups::Group> group_;
  engine::progress::DeferredCalls deferred_;
};

inline void DeviceCalls::attach(std::shared_ptr<engine::Engine> engine,
                                std::shared_ptr<engine::groups::Group> group) {
  engine_ = std::move(engine);
  group_ = std::move(group);
}

}  // namespace smddp::process_group
