// Calls among ranks that share one GPU, carried out in its memory (cuda/shared_call.h).
//
// Threads: any; calls begin one after the other, in the order of the group. Lives as long as one of its calls. Owns
// this rank's workspace on the GPU, and the memory of other ranks that it has opened.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>

#include "cuda/shared_gpu.h"
#include "engine/engine.h"
#include "process_group/device/copies.h"
#include "process_group/device/turns.h"

namespace smddp::process_group::device {

class GpuMemoryPath : public std::enable_shared_from_this<GpuMemoryPath> {
 public:
  // library: of the CUDA part.
  GpuMemoryPath(std::shared_ptr<engine::Engine> engine,
                std::shared_ptr<engine::groups::Group> group, c10::Device device,
                std::string library);

  // Opens the memory of the other ranks, in the order of the group's calls; blocks until all ranks have come. Returns
  // an empty string, or why that is not possible, which is the same text on all ranks. Runs no continuations.
  std::string connect(Nanoseconds timeout);

  // Carries out a call whose buffers are on the GPU, on the stream of `copies`.
  std::shared_ptr<DeviceTurns> begin(const engine::calls::Request& request,
                                     const std::shared_ptr<DeviceCopies>& copies,
                                     CallMemoryPtr memory);

  // A vector in memory that the other ranks can open. That of torch's allocator cannot always be opened.
  at::Tensor allocate(int64_t size, const at::TensorOptions& options);

  cuda::SharedGpu& gpu() { return *gpu_; }
  engine::Engine& engine() { return *engine_; }
  const std::shared_ptr<engine::groups::Group>& group() const { return group_; }

 private:
  template <typename T>
  std::vector<T> gather(const T& mine, Nanoseconds timeout);

  const std::shared_ptr<engine::Engine> engine_;
  const std::shared_ptr<engine::groups::Group> group_;
  const c10::Device device_;
  const std::string library_;
  std::unique_ptr<cuda::SharedGpu> gpu_;  // after connect()
};

}  // namespace smddp::process_group::device
