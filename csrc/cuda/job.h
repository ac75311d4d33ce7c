// One reduction or copy, as the kernels of the CUDA part get it. It is plain data, since it is handed to a library that
// is loaded at run time, and from there to the GPU.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace smddp::cuda {

// The most ranks that may share one GPU: a job has a place for the buffer of each.
inline constexpr int kMaxSharing = 16;

// dsts[d][i] = op over s of srcs[s][i], with the same results as reduction::reduce(), bit by bit. A destination may be
// one of the sources.
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

// Returns the job in its simplest form: averages and scaled sums without a scale are sums, and a job with one source is
// a copy of bytes, whatever its type.
inline Job normalised(Job job) {
  if (job.pre || job.post) return job;
  if (job.op == ReduceOp::AVG || job.op == ReduceOp::PREMUL_SUM) job.op = ReduceOp::SUM;
  if (job.numSrcs == 1) {
    const uint64_t bytes = job.count * sizeOf(job.type);
    // As elements of the widest type for which all addresses are aligned: where 16 bytes at a time are not possible,
    // the kernel moves element by element.
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
