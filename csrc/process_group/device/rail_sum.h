// The middle stage of a reduction on rails (gpu_rails.h): it sums between nodes what NCCL has summed inside them.
//
//   on the CPU   the rail's all_reduce or reduce_scatter, through the host; the engine sums
//   on the GPU   an all-to-all of the shares' blocks through the host; one kernel that sums the blocks of all nodes in
//                the order of nodes (cuda/job.h); for an all_reduce, then an all-gather of the sums through the host
//
// Calls on a rail must come in the same order on all its ranks. The first step is made with the call. Later steps are
// made in the order of calls, too, but by another thread at another time, and so they have a rail of their own.
//
// Threads: one at a time for the first steps, and one for the later steps. Shares the rails.
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
    // Enqueues the rest, when the first has ended and the current stream waits for it. Returns what then has to end, or
    // null. Empty: there is no rest.
    std::function<c10::intrusive_ptr<Work>()> second;
  };
  struct Call {
    c10d::ReduceOp op;
    std::chrono::milliseconds timeout;
    std::shared_ptr<DeviceCopies> copies;  // whose stream is current when `second` runs
  };

  virtual ~RailSum() = default;
  // The number of elements of a share must be a multiple of this.
  virtual int64_t multiple() const { return 1; }
  // In place.
  virtual Steps sumAll(const Call& call, const at::Tensor& share) = 0;
  // `blocks`: one of the size of `output` for each node.
  virtual Steps sumBlocks(const Call& call, const at::Tensor& output, const at::Tensor& blocks) = 0;

  using Rail = c10::intrusive_ptr<ProcessGroup>;
  static std::unique_ptr<RailSum> onCpu(Rail rail);
  // `rail`, `second`: two groups of the same ranks.
  static std::unique_ptr<RailSum> onGpu(Rail rail, Rail second, const cuda::DeviceTable& table);
};

}  // namespace smddp::process_group::device
