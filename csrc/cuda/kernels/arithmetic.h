// The arithmetic of single elements. The GPU runs this code; tests compile it for the CPU.
//
// The results are those of reduction/reduce.h, bit by bit: sources are taken in their order, float16 and bfloat16 are
// computed in float32 and rounded once at the end, and there is no fused multiply-add (nvcc gets -fmad=false).
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cuda/job.h"

#if defined(__CUDACC__)
#define SMDDP_BOTH __host__ __device__ __forceinline__
#else
#define SMDDP_BOTH inline
#endif

namespace smddp::cuda {

// --- formats: how an element lies in memory, and the type it is computed in ---------------------------------------

template <typename T>
struct Plain {
  using Element = T;
  using Number = T;
  SMDDP_BOTH static T load(T element) { return element; }
  SMDDP_BOTH static T store(T number) { return number; }
};

// One byte; every value but zero is true.
struct Truth {
  using Element = uint8_t;
  using Number = uint8_t;
  SMDDP_BOTH static uint8_t load(uint8_t element) { return element != 0 ? 1 : 0; }
  SMDDP_BOTH static uint8_t store(uint8_t number) { return number; }
};

// The upper half of a float32.
struct Bfloat16 {
  using Element = uint16_t;
  using Number = float;
  SMDDP_BOTH static float load(uint16_t element) {
    return std::bit_cast<float>(static_cast<uint32_t>(element) << 16);
  }
  // Rounds to nearest even. finish() makes every NaN the same, and the addition keeps that a NaN.
  SMDDP_BOTH static uint16_t store(float number) {
    const auto bits = std::bit_cast<uint32_t>(number);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

// IEEE binary16. GPUs have instructions for both conversions, with the same results but for the bits of NaN.
struct Float16 {
  using Element = uint16_t;
  using Number = float;

  SMDDP_BOTH static float load(uint16_t element) {
#if defined(__CUDA_ARCH__)
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(element));
    return number;
#else
    constexpr uint32_t kSmallestNormal = 0x38800000u;  // 2^-14
    constexpr uint32_t kBias = (127u - 15u) << 23;     // between the two exponents
    const uint32_t magnitude = element & 0x7fffu;
    const uint32_t sign = (element & 0x8000u) << 16;
    uint32_t bits = magnitude << 13;
    if (magnitude >= 0x7c00u) {
      bits |= 0x7f800000u;
    } else if (magnitude >= 0x0400u) {
      bits += kBias;
    } else {
      // A denormal is a multiple of 2^-24. Its bits are put behind the exponent of 2^-14, where the last one is worth
      // as much, and 2^-14 is subtracted.
      bits = std::bit_cast<uint32_t>(std::bit_cast<float>(bits | kSmallestNormal) -
                                     std::bit_cast<float>(kSmallestNormal));
    }
    return std::bit_cast<float>(bits | sign);
#endif
  }

  SMDDP_BOTH static uint16_t store(float number) {
    if (number != number) return 0x7e00u;
#if defined(__CUDA_ARCH__)
    uint16_t element;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(element) : "f"(number));
    return element;
#else
    constexpr uint32_t kOverflow = 0x477ff000u;  // 65520: this and larger numbers become infinity
    const auto all = std::bit_cast<uint32_t>(number);
    const uint32_t bits = all & 0x7fffffffu;
    uint32_t half = 0x7c00u;
    if (bits < 0x38800000u) {
      // In float32, the last bit of numbers in [0.5, 1) is worth 2^-24, like the last bit of a float16 denormal. So
      // adding 0.5 rounds.
      half = std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + 0.5f) - 0x3f000000u;
    } else if (bits < kOverflow) {
      half = (bits + 0xfffu + ((bits >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
    }
    return static_cast<uint16_t>(half | ((all >> 16) & 0x8000u));
#endif
  }
};

// --- operations ---------------------------------------------------------------------------------------------------

// Integers are computed as unsigned, since overflow of signed ones is undefined, and short ones are promoted to int.
template <typename T>
using Unsigned = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <ReduceOp kOp, typename T>
SMDDP_BOTH T combine(T a, T b) {
  if constexpr (kOp == ReduceOp::MIN || kOp == ReduceOp::MAX) {
    const bool better = kOp == ReduceOp::MIN ? b < a : b > a;
    // A comparison with NaN is false: so a NaN in `a` stays, and a NaN in `b` must be chosen.
    return better || b != b ? b : a;
  } else if constexpr (kOp == ReduceOp::BAND) {
    return static_cast<T>(a & b);
  } else if constexpr (kOp == ReduceOp::BOR) {
    return static_cast<T>(a | b);
  } else if constexpr (kOp == ReduceOp::BXOR) {
    return static_cast<T>(a ^ b);
  } else if constexpr (std::is_floating_point_v<T>) {
    return kOp == ReduceOp::PRODUCT ? a * b : a + b;
  } else {
    const auto x = static_cast<Unsigned<T>>(a), y = static_cast<Unsigned<T>>(b);
    return static_cast<T>(kOp == ReduceOp::PRODUCT ? x * y : x + y);
  }
}

// The last step, after all sources.
template <ReduceOp kOp, typename T>
SMDDP_BOTH T finish(T value, int64_t divisor) {
  if constexpr (std::is_floating_point_v<T>) {
    if constexpr (kOp == ReduceOp::AVG) value = value / static_cast<T>(divisor);
    constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();
    return value == value ? value : kNaN;
  } else if constexpr (kOp == ReduceOp::AVG) {
    // In 64 bits, since the divisor may not fit the type.
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return static_cast<T>(static_cast<Wide>(value) / static_cast<Wide>(divisor));
  } else {
    return value;
  }
}

// --- elements of a job --------------------------------------------------------------------------------------------

// Elements that are read and written in one access.
template <typename Element, int kCount>
struct alignas(sizeof(Element) * kCount) Pack {
  Element values[kCount];
};

template <typename Format>
inline constexpr int kPerAccess = 16 / static_cast<int>(sizeof(typename Format::Element));

// Whether all buffers allow accesses of 16 bytes.
inline bool isAligned(const Job& job) {
  uintptr_t bits = 0;
  for (int s = 0; s < job.numSrcs; ++s) bits |= reinterpret_cast<uintptr_t>(job.srcs[s]);
  for (int d = 0; d < job.numDsts; ++d) bits |= reinterpret_cast<uintptr_t>(job.dsts[d]);
  return bits % 16 == 0;
}

template <typename Format, ReduceOp kOp, int kCount>
SMDDP_BOTH void loadPack(const Job& job, int source, uint64_t index,
                         typename Format::Number (&numbers)[kCount]) {
  using Number = typename Format::Number;
  const auto pack =
      static_cast<const Pack<typename Format::Element, kCount>*>(job.srcs[source])[index];
  for (int i = 0; i < kCount; ++i) {
    numbers[i] = Format::load(pack.values[i]);
    if constexpr (kOp == ReduceOp::PREMUL_SUM) numbers[i] *= static_cast<Number>(job.factor);
  }
}

// Elements [index * kCount, (index + 1) * kCount). All sources are read before anything is written.
template <typename Format, ReduceOp kOp, int kCount>
SMDDP_BOTH void reducePack(const Job& job, uint64_t index) {
  using Number = typename Format::Number;
  using Elements = Pack<typename Format::Element, kCount>;
  Number sums[kCount], next[kCount];
  loadPack<Format, kOp, kCount>(job, 0, index, sums);
  for (int s = 1; s < job.numSrcs; ++s) {
    loadPack<Format, kOp, kCount>(job, s, index, next);
    for (int i = 0; i < kCount; ++i) sums[i] = combine<kOp>(sums[i], next[i]);
  }
  Elements result;
  for (int i = 0; i < kCount; ++i) {
    result.values[i] = Format::store(finish<kOp>(sums[i], job.divisor));
  }
  for (int d = 0; d < job.numDsts; ++d) static_cast<Elements*>(job.dsts[d])[index] = result;
}

}  // namespace smddp::cuda
