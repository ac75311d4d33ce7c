// The memory of one call, and who owns it until when.
//
// Each call has one of these. Whoever may still touch the tensors holds it; they are freed when the last holder drops it.
//
//   holder                       holds it
//   Work                         until it is dropped. A Work of coalesced calls holds theirs
//   operations of the engine     from submission until they have ended (Request::keepAlive). The engine drops it when
//                                its owner has let go, on the thread that ended the operation
//   the engine's group           after an operation has failed, until nobody can reach the memory of the group any more:
//                                the network may read the tensors, and ranks of the node may write to them
//   calls carried out on a       until their last part has ended (DeviceTurns)
//   device
//   copies of a device           until nothing more is enqueued for the call (DeviceCopies)
//   the process (keepForGood)    for ever, where a device or another rank may touch the tensors after an error
//
// So a caller may drop its tensors, and the Work, as soon as a call has returned or thrown. What is no tensor of a caller
// (a sum of several steps, the byte of a barrier, a message of the mailbox) the operations hold in the same way. Torch's
// future, once it is completed, has references to the outputs of its own.
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
