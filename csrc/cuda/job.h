// One reduction or copy as the kernels of the CUDA part see it: plain data, for it crosses into a library that is
// loaded at run time, and from there to the GPU.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace smddp::cuda {

// Ranks that may share one GPU: a job has a place for the buffer of each.
inline constexpr int kMaxSharing = 16;

// dsts[d][i] = op over s of srcs[s][i], with the meaning and the very numbers of reduction::reduce(). A destination
// may be one of the sources.
struct Job {
  const void* srcs[kMaxSharing] = {};
  void* dsts[kMaxSharing] = {};
  uint64_t count = 0;  // elements
  double factor = 1.0;
  int64_t divisor = 1;
  int32_t numSrcs = 0;
  int32_t numDsts = 0;
  DataType type = DataType::uint8;
  ReduceOp op = ReduceOp::SUM;
  bool pre = false;   // PREMUL_SUM: multiply every source by `factor`
  bool post = false;  // AVG: divide the result by `divisor`
};

// The same job in its plainest form: without a scale averages and scaled sums are sums, and of a single source
// nothing is left but its bytes, however they are called.
inline Job normalised(Job job) {
  if (job.pre || job.post) return job;
  if (job.op == ReduceOp::AVG || job.op == ReduceOp::PREMUL_SUM) job.op = ReduceOp::SUM;
  if (job.numSrcs == 1) {
    const uint64_t bytes = job.count * sizeOf(job.type);
    // In pieces as wide as all addresses allow: what is not aligned for 16 bytes is moved piece by piece.
    uint64_t alignment = bytes | reinterpret_cast<uintptr_t>(job.srcs[0]);
    for (int32_t d = 0; d < job.numDsts; ++d) alignment |= reinterpret_cast<uintptr_t>(job.dsts[d]);
    job.type = alignment % 8 == 0   ? DataType::int64
               : alignment % 4 == 0 ? DataType::int32
                                    : DataType::uint8;
    job.count = bytes / sizeOf(job.type);
    job.op = ReduceOp::SUM;
  }
  return job;
}

}  // namespace smddp::cuda
