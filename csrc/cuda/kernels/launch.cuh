// Kernels of jobs. Each thread takes 16 bytes of every source at a time, and neighbouring threads take neighbouring
// bytes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/kernels/dispatch.h"

namespace smddp::cuda {

constexpr int kThreads = 512;

template <typename Format, ReduceOp kOp>
__global__ void __launch_bounds__(kThreads)
    reduceKernel(const __grid_constant__ Job job, bool aligned) {
  constexpr int kCount = kPerAccess<Format>;
  const uint64_t stride = static_cast<uint64_t>(gridDim.x) * kThreads;
  const uint64_t first = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const uint64_t packs = aligned ? job.count / kCount : 0;
  for (uint64_t i = first; i < packs; i += stride) reducePack<Format, kOp, kCount>(job, i);
  for (uint64_t i = packs * kCount + first; i < job.count; i += stride) {
    reducePack<Format, kOp, 1>(job, i);
  }
}

// Launches enough blocks to fill the GPU, but not more than there is work for. By a function instead of <<<>>>, so that
// this is C++, which tests compile for the CPU.
struct Launcher {
  cudaStream_t stream;
  int maxBlocks;
  cudaError_t* error;  // of the launch

  template <typename Format, ReduceOp kOp>
  void run(const Job& job) const {
    const bool aligned = isAligned(job);
    const uint64_t perBlock = static_cast<uint64_t>(kThreads) * (aligned ? kPerAccess<Format> : 1);
    const uint64_t blocks = std::min<uint64_t>((job.count + perBlock - 1) / perBlock, maxBlocks);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    *error = cudaLaunchKernelEx(&config, reduceKernel<Format, kOp>, job, aligned);
  }
};

// False where the type does not have the operation. Each file defines one.
bool launchFloats(const Launcher& launcher, const Job& job);
bool launchIntegers(const Launcher& launcher, const Job& job);

}  // namespace smddp::cuda
