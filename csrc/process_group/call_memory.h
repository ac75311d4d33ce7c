// The memory of one call, and who owns it until when.
//
// Each call has one of these. Whoever may still touch the tensors holds it; the last holder that drops it frees them.
//
//   holder                     holds it
//   Work                       until it is dropped: by the caller, and by the queue of futures (call_order.h), if
//                              somebody has asked for its future. A Work of coalesced calls holds their Works
//   operations of the engine   until they have ended (Request::keepAlive). The thread that ended one drops it. It does
//                              so when it does not own the engine
//   the engine's group         after a failure, until no rank and no network can reach the memory of the group
//   DeviceTurns                until the call has ended on the device
//   DeviceCopies               until nothing more is enqueued for the call
//   keepForGood()              until the process ends, after an error of a device
//
// So a caller may drop its tensors and the Work as soon as the call has returned or thrown. Torch's future has
// references of its own to the outputs, once it is completed. Operations whose buffers are no tensors of a caller hold
// what these belong to in the same way: a sparse sum, the byte of a barrier, a message of the mailbox.
//
// Threads: filled by the thread that makes the call, before it submits it; constant after that. To free a tensor may
// take Python's interpreter lock.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <utility>
#include <vector>

namespace smddp::process_group {

struct CallMemory {
  CallMemory(std::vector<at::Tensor> inputs, std::vector<std::vector<at::Tensor>> outputs)
      : inputs(std::move(inputs)), outputs(std::move(outputs)) {}

  const at::Tensor& add(at::Tensor tensor) { return staged.emplace_back(std::move(tensor)); }

  std::vector<at::Tensor> inputs;
  // result() and the future are made of these: one list, or one per input.
  std::vector<std::vector<at::Tensor>> outputs;
  // What takes the place of tensors that cannot be used where they lie, and parts of tensors that a device reads.
  std::vector<at::Tensor> staged;
};

using CallMemoryPtr = std::shared_ptr<CallMemory>;

}  // namespace smddp::process_group
