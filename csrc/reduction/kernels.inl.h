// The loops, written once. Each kernels_<level>.cc compiles this file with its own -m flags, and
// the widest register those allow decides the number of lanes.
//
// Everything here is in an unnamed namespace and calls nothing but compiler builtins: a function
// that two levels shared would be merged by the linker, and the baseline could end up with AVX-512
// code.
#pragma once

#include "reduction/kernel_table.h"
#include "reduction/number_formats.inl.h"

namespace smddp::reduction {
namespace {

template <typename T>
struct UnsignedOf {
  using Type = T;
};
template <>
struct UnsignedOf<int32_t> {
  using Type = uint32_t;
};
template <>
struct UnsignedOf<int64_t> {
  using Type = uint64_t;
};

// One operation on whole vectors. Overflow of signed integers is undefined, so they are added and
// multiplied as unsigned ones: the bits are the same.
template <ReduceOp kOp, typename T, int kLanes>
SMDDP_INLINE Vector<T, kLanes> combine(Vector<T, kLanes> a, Vector<T, kLanes> b) {
  using Wrapping = Vector<typename UnsignedOf<T>::Type, kLanes>;
  if constexpr (kOp == ReduceOp::MIN || kOp == ReduceOp::MAX) {
    const auto better = kOp == ReduceOp::MIN ? b < a : b > a;
    // A comparison with NaN is false: a NaN in `a` stays by itself, one in `b` must be taken.
    if constexpr (kIsFloat<T>) return (better | (b != b)) ? b : a;
    return better ? b : a;
  } else if constexpr (kOp == ReduceOp::PRODUCT) {
    return (Vector<T, kLanes>)((Wrapping)a * (Wrapping)b);
  } else {
    return (Vector<T, kLanes>)((Wrapping)a + (Wrapping)b);
  }
}

// What is left to do once all sources are in.
template <ReduceOp kOp, typename T, int kLanes>
SMDDP_INLINE Vector<T, kLanes> finish(Vector<T, kLanes> value, int64_t divisor) {
  if constexpr (kIsFloat<T>) {
    if constexpr (kOp == ReduceOp::AVG) value = value / (T)divisor;
    // Whose payload the sum of two NaNs keeps depends on how the compiler ordered them: keep
    // neither.
    return value == value ? value : Vector<T, kLanes>{} + (T)__builtin_nan("");
  } else if constexpr (kOp == ReduceOp::AVG) {
    // In 64 bits, since the divisor need not fit the type: 300 ranks may average bytes.
    for (int lane = 0; lane < kLanes; ++lane) value[lane] = (T)((int64_t)value[lane] / divisor);
    return value;
  } else {
    return value;
  }
}

template <typename Format, ReduceOp kOp, int kVectors, int kLanes, typename V>
SMDDP_INLINE void input(const void* src, size_t i, double factor, V (&values)[kVectors]) {
  using T = typename Format::Arithmetic;
  Format::template load<kVectors, kLanes>((const typename Format::Element*)src + i, values);
  if constexpr (kOp == ReduceOp::PREMUL_SUM)
    for (int v = 0; v < kVectors; ++v) values[v] = values[v] * (T)factor;
}

// kVectors * kLanes elements from position i on. All sources are read before anything is written,
// so a destination may be a source. kSources = 0 takes the number from the job.
template <typename Format, ReduceOp kOp, int kSources, int kVectors, int kLanes>
SMDDP_INLINE void step(const Job& job, const void* const* srcs, size_t i) {
  using T = typename Format::Arithmetic;
  using Element = typename Format::Element;
  Vector<T, kLanes> sums[kVectors];
  Vector<T, kLanes> next[kVectors];
  input<Format, kOp, kVectors, kLanes>(srcs[0], i, job.factor, sums);
  const size_t numSrcs = kSources > 0 ? kSources : job.numSrcs;
  for (size_t s = 1; s < numSrcs; ++s) {
    input<Format, kOp, kVectors, kLanes>(srcs[s], i, job.factor, next);
    for (int v = 0; v < kVectors; ++v) sums[v] = combine<kOp, T, kLanes>(sums[v], next[v]);
  }
  for (int v = 0; v < kVectors; ++v) sums[v] = finish<kOp, T, kLanes>(sums[v], job.divisor);
  // Registers go to all destinations at once: faster than filling one and copying it while in
  // cache.
  for (size_t d = 0; d < job.numDsts; ++d)
    Format::template store<kVectors, kLanes>((Element*)job.dsts[d] + i, sums);
}

// Fewer elements than a register holds: half a register, a quarter, and so on down to one element.
template <typename Format, ReduceOp kOp, int kLanes>
SMDDP_INLINE void tail(const Job& job, size_t i) {
  if constexpr (kLanes > 0) {
    if (job.count - i >= kLanes) {
      step<Format, kOp, 0, 1, kLanes>(job, job.srcs, i);
      i += kLanes;
    }
    tail<Format, kOp, kLanes / 2>(job, i);
  }
}

template <typename Format, ReduceOp kOp, int kSources>
void run(const Job& job) {
  constexpr int kLanes = kRegisterBytes / (int)sizeof(typename Format::Arithmetic);
  constexpr int kUnroll = 4;
  // A copy that no store can alias, so that a known number of sources stays in registers.
  const void* known[kSources > 0 ? kSources : 1];
  for (int s = 0; s < kSources; ++s) known[s] = job.srcs[s];
  const void* const* srcs = kSources > 0 ? known : job.srcs;
  size_t i = 0;
  for (; job.count - i >= kUnroll * kLanes; i += kUnroll * kLanes)
    step<Format, kOp, kSources, kUnroll, kLanes>(job, srcs, i);
  for (; job.count - i >= kLanes; i += kLanes) step<Format, kOp, kSources, 1, kLanes>(job, srcs, i);
  tail<Format, kOp, kLanes / 2>(job, i);
}

// Two to four sources are the ranks of a small node and every step of a ring: worth a loop of their
// own for what training sums most.
template <typename Format, ReduceOp kOp>
void kernel(const Job& job) {
  if constexpr (kIsFloat<typename Format::Arithmetic> && kOp == ReduceOp::SUM) {
    if (job.numSrcs == 2) return run<Format, kOp, 2>(job);
    if (job.numSrcs == 3) return run<Format, kOp, 3>(job);
    if (job.numSrcs == 4) return run<Format, kOp, 4>(job);
  }
  run<Format, kOp, 0>(job);
}

template <typename Format, ReduceOp kOp>
constexpr Kernel cell() {
  // A factor is a fraction as a rule, and a fraction of an integer is no integer.
  if constexpr (kOp == ReduceOp::PREMUL_SUM && !kIsFloat<typename Format::Arithmetic>) {
    return nullptr;
  } else {
    return kernel<Format, kOp>;
  }
}

// The two lists whose product is the table, in the order of the enumerations.
template <ReduceOp... kOps>
struct Operations {
  template <typename Format>
  static constexpr KernelTable::Row row() {
    return {{cell<Format, kOps>()...}};
  }
  template <typename... Formats>
  static constexpr KernelTable of() {
    return {{row<Formats>()...}};
  }
};

constexpr KernelTable kTable =
    Operations<ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX,
               ReduceOp::PREMUL_SUM>::of<Plain<float>, Plain<double>, Float16, Bfloat16,
                                         Plain<int32_t>, Plain<int64_t>, Plain<uint8_t>>();

}  // namespace
}  // namespace smddp::reduction
