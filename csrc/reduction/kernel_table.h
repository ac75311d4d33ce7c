// The tables [DataType][ReduceOp] -> kernel and [Wire] -> kernel, one of each for every instruction set for which the
// library was compiled.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "common/types.h"
#include "reduction/encoded.h"
#include "reduction/reduce.h"

namespace smddp::reduction {

// The arguments of a kernel. It has plain pointers, because kernel files must not instantiate inline functions of the
// standard library: the linker could keep the copy that was compiled with their -m flags.
struct Job {
  void* const* dsts;
  size_t numDsts;
  const void* const* srcs;
  size_t numSrcs;
  size_t count;
  double factor;
  double divisor;
};

using Kernel = void (*)(const Job& job);

// The arguments of a kernel of reduceEncoded().
struct EncodedJob {
  const Destination* dsts;
  size_t numDsts;
  const Source* srcs;
  size_t numSrcs;
  size_t count;
  bool divides;
  double divisor;
  float* residual;
};

using EncodedKernel = void (*)(const EncodedJob& job);

// A null entry is an unsupported combination.
struct KernelTable {
  struct Row {
    Kernel ops[kNumReduceOps];
  };
  Row types[kNumDataTypes];
  EncodedKernel wires[kNumWires];
};

extern const KernelTable kScalarKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

// Null if this build or this processor lacks the level.
const KernelTable* kernelsOf(SimdLevel level);

// The level for a value of SMDDP_SIMD; throws Usage as simdLevel() does.
SimdLevel parseSimdLevel(std::string_view wanted);

// reduce() and reduceEncoded() with a given table, so that one process can compare the levels.
void reduceWith(const KernelTable& kernels, std::span<void* const> dsts,
                std::span<const void* const> srcs, size_t count, DataType type, ReduceOp op,
                const Scale& scale);
void reduceEncodedWith(const KernelTable& kernels, Wire wire, std::span<const Destination> dsts,
                       std::span<const Source> srcs, size_t count, ReduceOp op, const Scale& scale,
                       float* residual = nullptr);

// Throws for arguments that reduce() and reduceEncoded() refuse.
void checkArguments(size_t numSrcs, DataType type, ReduceOp op, const Scale& scale);

}  // namespace smddp::reduction
