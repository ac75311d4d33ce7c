// The loops of all kernels. Each kernels_<level>.cc compiles this file with its own -m flags; the widest register
// that they allow determines the number of lanes.
//
// Everything here is in an unnamed namespace and calls compiler builtins only. The linker would merge a function that
// two levels share, and the baseline could get AVX-512 code.
#pragma once

#include <utility>

#include "reduction/encoded.inl.h"
#include "reduction/kernel_table.h"
#include "reduction/number_formats.inl.h"

namespace smddp::reduction {
namespace {

// Overflow of signed integers is undefined. So they are added and multiplied as unsigned ones, with the same bits.
template <typename T, int kBytes = kIsFloat<T> ? 0 : sizeof(T)>
struct WrappingOf {
  using Type = T;
};
template <typename T>
struct WrappingOf<T, 1> {
  using Type = uint8_t;
};
template <typename T>
struct WrappingOf<T, 2> {
  using Type = uint16_t;
};
template <typename T>
struct WrappingOf<T, 4> {
  using Type = uint32_t;
};
template <typename T>
struct WrappingOf<T, 8> {
  using Type = uint64_t;
};
template <typename T>
using Wrapping = typename WrappingOf<T>::Type;

// One operation on whole vectors.
template <ReduceOp kOp, typename T, int kLanes>
SMDDP_INLINE Vector<T, kLanes> combine(Vector<T, kLanes> a, Vector<T, kLanes> b) {
  using Wrapped = Vector<Wrapping<T>, kLanes>;
  if constexpr (kOp == ReduceOp::MIN || kOp == ReduceOp::MAX) {
    const auto better = kOp == ReduceOp::MIN ? b < a : b > a;
    // A comparison with NaN is false. So a NaN in `a` stays, but one in `b` must be taken explicitly.
    if constexpr (kIsFloat<T>) return (better | (b != b)) ? b : a;
    return better ? b : a;
  } else if constexpr (kOp == ReduceOp::PRODUCT) {
    return (Vector<T, kLanes>)((Wrapped)a * (Wrapped)b);
  } else if constexpr (kOp == ReduceOp::BAND) {
    return a & b;
  } else if constexpr (kOp == ReduceOp::BOR) {
    return a | b;
  } else if constexpr (kOp == ReduceOp::BXOR) {
    return a ^ b;
  } else {
    return (Vector<T, kLanes>)((Wrapped)a + (Wrapped)b);
  }
}

template <bool kSigned>
struct WideOf {
  using Type = int64_t;
};
template <>
struct WideOf<false> {
  using Type = uint64_t;
};

// Finishes a value after all sources are combined.
template <ReduceOp kOp, typename T, int kLanes>
SMDDP_INLINE Vector<T, kLanes> finish(Vector<T, kLanes> value, double divisor) {
  if constexpr (kIsFloat<T>) {
    if constexpr (kOp == ReduceOp::AVG) value = value / (T)divisor;
    // The payload of the sum of two NaNs depends on the order that the compiler chose. So replace it.
    return value == value ? value : Vector<T, kLanes>{} + (T)__builtin_nan("");
  } else if constexpr (kOp == ReduceOp::AVG) {
    // Divide in 64 bits, because the divisor may not fit into the type: 300 ranks may average bytes.
    using Wide = typename WideOf<((T)-1 < 0)>::Type;
    for (int lane = 0; lane < kLanes; ++lane) value[lane] = (T)((Wide)value[lane] / (Wide)divisor);
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

// Reduces kVectors * kLanes elements from position i on. Reads all sources before it writes, so a destination may be a
// source. If kSources is 0, the job has the number of sources.
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
  // Store the registers to all destinations. That is faster than to copy the first destination from the cache.
  for (size_t d = 0; d < job.numDsts; ++d)
    Format::template store<kVectors, kLanes>((Element*)job.dsts[d] + i, sums);
}

// Reduces the last elements, fewer than a register holds: half a register, a quarter, and so on down to one element.
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
  // No store can alias this copy, so the pointers of a known number of sources stay in registers.
  const void* known[kSources > 0 ? kSources : 1];
  for (int s = 0; s < kSources; ++s) known[s] = job.srcs[s];
  const void* const* srcs = kSources > 0 ? known : job.srcs;
  size_t i = 0;
  for (; job.count - i >= kUnroll * kLanes; i += kUnroll * kLanes)
    step<Format, kOp, kSources, kUnroll, kLanes>(job, srcs, i);
  for (; job.count - i >= kLanes; i += kLanes) step<Format, kOp, kSources, 1, kLanes>(job, srcs, i);
  tail<Format, kOp, kLanes / 2>(job, i);
}

// Floating-point sums of two to four sources have loops of their own. They are the most frequent ones in training: a
// small node has so many ranks, and every step of a ring has two.
template <typename Format, ReduceOp kOp>
void kernel(const Job& job) {
  if constexpr (kIsFloat<typename Format::Arithmetic> && kOp == ReduceOp::SUM) {
    if (job.numSrcs == 2) return run<Format, kOp, 2>(job);
    if (job.numSrcs == 3) return run<Format, kOp, 3>(job);
    if (job.numSrcs == 4) return run<Format, kOp, 4>(job);
  }
  run<Format, kOp, 0>(job);
}

// For elements that consist of kParts parts, which are computed one by one.
template <typename Format, ReduceOp kOp, int kParts>
void kernelOfParts(const Job& job) {
  Job parts = job;
  parts.count *= kParts;
  kernel<Format, kOp>(parts);
}

// The format of each data type.
template <DataType kType>
struct FormatOf;
template <typename T>
struct Is {
  using Type = T;
};
// clang-format off
template <> struct FormatOf<DataType::float32> : Is<Plain<float>> {};
template <> struct FormatOf<DataType::float64> : Is<Plain<double>> {};
template <> struct FormatOf<DataType::float16> : Is<Float16> {};
template <> struct FormatOf<DataType::bfloat16> : Is<Bfloat16> {};
template <> struct FormatOf<DataType::complex64> : Is<Plain<float>> {};
template <> struct FormatOf<DataType::complex128> : Is<Plain<double>> {};
template <> struct FormatOf<DataType::int8> : Is<Plain<int8_t>> {};
template <> struct FormatOf<DataType::int16> : Is<Plain<int16_t>> {};
template <> struct FormatOf<DataType::int32> : Is<Plain<int32_t>> {};
template <> struct FormatOf<DataType::int64> : Is<Plain<int64_t>> {};
template <> struct FormatOf<DataType::uint8> : Is<Plain<uint8_t>> {};
template <> struct FormatOf<DataType::uint16> : Is<Plain<uint16_t>> {};
template <> struct FormatOf<DataType::uint32> : Is<Plain<uint32_t>> {};
template <> struct FormatOf<DataType::uint64> : Is<Plain<uint64_t>> {};
template <> struct FormatOf<DataType::boolean> : Is<Truth> {};
// clang-format on

constexpr bool isBitwise(ReduceOp op) {
  return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
}

// The operations of complex numbers. Other backends define no product either.
constexpr bool isLinear(ReduceOp op) {
  return op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::PREMUL_SUM;
}

// Maps the operations of booleans to BOR, BAND and BXOR.
constexpr ReduceOp logical(ReduceOp op) {
  if (op == ReduceOp::SUM || op == ReduceOp::MAX) return ReduceOp::BOR;
  if (op == ReduceOp::PRODUCT || op == ReduceOp::MIN) return ReduceOp::BAND;
  return op;
}

// The kernel of a combination; null if it is unsupported. Types share kernels: signed and unsigned sums have the same
// bits, and bitwise operations work on bytes.
template <DataType kType, ReduceOp kOp>
constexpr Kernel cell() {
  using Format = typename FormatOf<kType>::Type;
  using T = typename Format::Arithmetic;
  constexpr bool kIsComplex = kType == DataType::complex64 || kType == DataType::complex128;
  if constexpr (kType == DataType::boolean) {
    if constexpr (isBitwise(logical(kOp))) return kernel<Format, logical(kOp)>;
  } else if constexpr (kIsComplex) {
    if constexpr (isLinear(kOp)) return kernelOfParts<Format, kOp, 2>;
  } else if constexpr (kIsFloat<T>) {
    if constexpr (!isBitwise(kOp)) return kernel<Format, kOp>;
  } else if constexpr (isBitwise(kOp)) {
    return kernelOfParts<Plain<uint8_t>, kOp, sizeof(T)>;
  } else if constexpr (kOp == ReduceOp::SUM || kOp == ReduceOp::PRODUCT) {
    return kernel<Plain<Wrapping<T>>, kOp>;
  } else if constexpr (kOp != ReduceOp::PREMUL_SUM) {
    // PREMUL_SUM is unsupported: the factor usually is a fraction, and the product would not be an integer.
    return kernel<Format, kOp>;
  }
  return nullptr;
}

template <DataType kType, int... kOps>
constexpr KernelTable::Row row(std::integer_sequence<int, kOps...>) {
  return {{cell<kType, (ReduceOp)kOps>()...}};
}

template <int... kTypes>
constexpr KernelTable table(std::integer_sequence<int, kTypes...>) {
  return {{row<(DataType)kTypes>(std::make_integer_sequence<int, kNumReduceOps>{})...},
          {encodedKernel<Fp32Wire>, encodedKernel<Bf16Wire>, encodedKernel<Int8Wire>}};
}

constexpr KernelTable kTable = table(std::make_integer_sequence<int, kNumDataTypes>{});

}  // namespace
}  // namespace smddp::reduction
