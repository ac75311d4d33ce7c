// The calls of a group on tensors of a device, as the group's other files see them (device_calls.h).
//
// A call goes through memory of the host, as one on the CPU whose buffers have to be filled first; or, where the group
// has a route for it, the device carries it out.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "process_group/device/sources.h"
#include "process_group/device/staging.h"
#include "process_group/device/turns.h"
#include "process_group/device_calls.h"

namespace smddp::process_group::device {

// How calls are carried out on the device itself.
class Route {
 public:
  virtual ~Route() = default;
  virtual bool serves(collectives::Collective collective, const at::Tensor& tensor,
                      ReduceOp op) const = 0;
  // Begins a call whose buffers are on the device, on the stream of `copies`.
  virtual std::shared_ptr<DeviceTurns> begin(const engine::calls::Request& request,
                                             const std::shared_ptr<DeviceCopies>& copies,
                                             CallMemoryPtr memory) = 0;
};

class Calls final : public DeviceCalls {
 public:
  // route, sources: null where there is none; both outlive the object.
  explicit Calls(Route* route = nullptr, DeviceSources* sources = nullptr)
      : route_(route), sources_(sources) {}
  std::unique_ptr<DeviceCalls> forSplit() const override { return std::make_unique<Calls>(); }

  // From now on messages to other nodes leave from memory of the device, where that is possible. Before the first call.
  void sendFrom(DeviceSources& sources) { sources_ = &sources; }

  std::shared_ptr<DeviceCall> begin(const CallKind& kind, const at::Tensor& first,
                                    const CallMemoryPtr& memory) override;
  c10::intrusive_ptr<Work> submit(Work::Call call, std::span<engine::calls::Request> requests,
                                  std::span<engine::calls::Message> messages) override;
  void synchronize() override;

 private:
  // Whether a call meets only ranks of other nodes: what goes between ranks of a node is copied by the host.
  bool leavesNode(const CallKind& kind) const;
  c10::intrusive_ptr<Work> submitThroughHost(Work::Call call,
                                             std::span<engine::calls::Request> requests,
                                             std::span<engine::calls::Message> messages);
  c10::intrusive_ptr<Work> submitOnDevice(Work::Call call,
                                          std::span<const engine::calls::Request> requests);
  c10::intrusive_ptr<Work> newWork(Work::Call call) const;
  // Makes synchronize() wait for a call.
  void remember(const c10::intrusive_ptr<Work>& work, const std::shared_ptr<DeviceCopies>& copies);

  Route* const route_;
  DeviceSources* sources_;
  // Collectives that may not have ended on the device. A Work that is gone has enqueued its copies.
  struct Unfinished {
    c10::weak_intrusive_ptr<Work> work;
    std::shared_ptr<DeviceCopies> copies;
  };
  std::mutex mutex_;
  std::vector<Unfinished> unfinished_;       // guarded by mutex_
  std::optional<c10::Device> latestDevice_;  // the same
};

}  // namespace smddp::process_group::device
