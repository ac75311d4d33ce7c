// [DataType][ReduceOp] -> kernel, one table for every instruction set the library was compiled for.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "common/types.h"
#include "reduction/reduce.h"

namespace smddp::reduction {

// One reduction as the kernels see it. Plain pointers: an inline function of the standard library
// that a kernel file instantiates under its own -m flags could be the copy that the linker keeps.
struct Job {
  void* const* dsts;
  size_t numDsts;
  const void* const* srcs;
  size_t numSrcs;
  size_t count;
  double factor;
  int64_t divisor;
};

using Kernel = void (*)(const Job& job);

// A null cell is a combination without meaning.
struct KernelTable {
  struct Row {
    Kernel ops[kNumReduceOps];
  };
  Row types[kNumDataTypes];
};

extern const KernelTable kScalarKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

// Null where this build or this processor lacks the level.
const KernelTable* kernelsOf(SimdLevel level);

// The level that a value of SMDDP_SIMD stands for; throws Usage as simdLevel() does.
SimdLevel parseSimdLevel(std::string_view wanted);

// reduce() with a given table, so that one process can compare the levels.
void reduceWith(const KernelTable& kernels, std::span<void* const> dsts,
                std::span<const void* const> srcs, size_t count, DataType type, ReduceOp op,
                const Scale& scale);

}  // namespace smddp::reduction
