// The middle stage of a reduction on rails (gpu_rails.h): what NCCL has summed inside nodes is summed between them.
//
//   on the CPU   the rail's all_reduce or reduce_scatter, through the host, summed by the engine
//   on the GPU   an all-to-all of the shares' blocks through the host, one kernel that sums the block of every node in
//                the order of nodes (cuda/job.h), and for an all_reduce an all-gather of the sums, through the host
//
// Calls on a rail have to come in the same order on all its ranks. The first is made with the call; what follows it is
// made in the order of calls, too, but by another thread at another time, and so has a rail of its own.
//
// Threads: one at a time for each of the two halves. Owns no group but shares of them.
#pragma once

#include <memory>

#include "cuda/device_table.h"
#include "process_group/device/copies.h"
#include "process_group/process_group.h"

namespace smddp::process_group::device {

class RailSum {
 public:
  struct Steps {
    c10::intrusive_ptr<Work> first;
    // When the first has ended and the current stream waits for it: enqueues what is left. Returns what has to end then;
    // null: nothing. Empty: nothing is left.
    std::function<c10::intrusive_ptr<Work>()> second;
  };
  struct Call {
    c10d::ReduceOp op;
    std::chrono::milliseconds timeout;
    std::shared_ptr<DeviceCopies> copies;  // whose stream is current when `second` runs
  };

  virtual ~RailSum() = default;
  // The elements of a share must be a multiple of so many.
  virtual int64_t multiple() const { return 1; }
  // In place.
  virtual Steps sumAll(const Call& call, const at::Tensor& share) = 0;
  // `blocks`: one of the size of `output` for each node.
  virtual Steps sumBlocks(const Call& call, const at::Tensor& output, const at::Tensor& blocks) = 0;

  using Rail = c10::intrusive_ptr<ProcessGroup>;
  static std::unique_ptr<RailSum> onCpu(Rail rail);
  // `rail`, `second`: of the same ranks.
  static std::unique_ptr<RailSum> onGpu(Rail rail, Rail second, const cuda::DeviceTable& table);
};

}  // namespace smddp::process_group::device
