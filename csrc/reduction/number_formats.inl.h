// Number formats: how vectors of elements are loaded, stored and computed.
//
// Vectors are an extension of GCC and Clang, so the same source becomes SSE2, AVX2, AVX-512 or NEON. In this file only
// float16 uses intrinsics, if there are any. The file is a part of kernels.inl.h; what is said there about unnamed
// namespaces applies here.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define SMDDP_INLINE [[gnu::always_inline]] inline

namespace smddp::reduction {
namespace {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

template <typename T, int kLanes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kLanes * sizeof(T))));
};
template <typename T, int kLanes>
using Vector = typename VectorOf<T, kLanes>::Type;

template <typename T>
constexpr bool kIsFloat = false;
template <>
constexpr bool kIsFloat<float> = true;
template <>
constexpr bool kIsFloat<double> = true;

// memcpy needs no alignment and avoids type punning.
template <typename V>
SMDDP_INLINE V loadBytes(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <typename V>
SMDDP_INLINE void storeBytes(void* to, V value) {
  __builtin_memcpy(to, &value, sizeof value);
}

// A format whose elements are computed in the type in which they are stored.
template <typename T>
struct Plain {
  using Element = T;
  using Arithmetic = T;

  template <int kVectors, int kLanes>
  SMDDP_INLINE static void load(const T* from, Vector<T, kLanes> (&values)[kVectors]) {
    for (int v = 0; v < kVectors; ++v) values[v] = loadBytes<Vector<T, kLanes>>(from + v * kLanes);
  }
  template <int kVectors, int kLanes>
  SMDDP_INLINE static void store(T* to, const Vector<T, kLanes> (&values)[kVectors]) {
    for (int v = 0; v < kVectors; ++v) storeBytes(to + v * kLanes, values[v]);
  }
};

// Booleans, one byte each. Any byte but zero is true, also in tensors that reinterpret other bytes. Results are stored
// as 0 or 1.
struct Truth {
  using Element = uint8_t;
  using Arithmetic = uint8_t;

  template <int kVectors, int kLanes>
  SMDDP_INLINE static void load(const uint8_t* from, Vector<uint8_t, kLanes> (&values)[kVectors]) {
    Plain<uint8_t>::load<kVectors, kLanes>(from, values);
    for (int v = 0; v < kVectors; ++v)
      values[v] = (Vector<uint8_t, kLanes>)(values[v] != 0) & (uint8_t)1;
  }
  template <int kVectors, int kLanes>
  SMDDP_INLINE static void store(uint8_t* to, const Vector<uint8_t, kLanes> (&values)[kVectors]) {
    Plain<uint8_t>::store<kVectors, kLanes>(to, values);
  }
};

// A format with two bytes in memory and float32 in registers. Bits converts a lane of 32 bits.
//
// To widen a vector lane by lane costs shuffles. So vectors are converted in pairs: one takes the lower halves of the
// 32-bit words, the other the upper halves. Then lanes are out of order, which does not matter to any operation.
template <typename Bits>
struct Half {
  using Element = uint16_t;
  using Arithmetic = float;

  template <int kVectors, int kLanes>
  SMDDP_INLINE static void load(const uint16_t* from, Vector<float, kLanes> (&values)[kVectors]) {
    using Words = Vector<uint32_t, kLanes>;
    for (int v = 0; v < kVectors; ++v) {
      const uint16_t* at = from + v * kLanes;
      if constexpr (Bits::template hasInstruction<kLanes>()) {
        values[v] = Bits::template loadByInstruction<kLanes>(at);
      } else if constexpr (kVectors % 2 == 0) {
        const Words words = loadBytes<Words>(at);
        values[v] = Bits::template toFloat<kLanes>(words & 0xffffu);
        values[++v] = Bits::template toFloat<kLanes>(words >> 16);
      } else {
        const auto bits = loadBytes<Vector<uint16_t, kLanes>>(at);
        values[v] = Bits::template toFloat<kLanes>(__builtin_convertvector(bits, Words));
      }
    }
  }

  template <int kVectors, int kLanes>
  SMDDP_INLINE static void store(uint16_t* to, const Vector<float, kLanes> (&values)[kVectors]) {
    for (int v = 0; v < kVectors; ++v) {
      uint16_t* at = to + v * kLanes;
      if constexpr (Bits::template hasInstruction<kLanes>()) {
        Bits::template storeByInstruction<kLanes>(at, values[v]);
      } else if constexpr (kVectors % 2 == 0) {
        const auto lower = Bits::template fromFloat<kLanes>(values[v]);
        storeBytes(at, lower | (Bits::template fromFloat<kLanes>(values[++v]) << 16));
      } else {
        const auto bits = Bits::template fromFloat<kLanes>(values[v]);
        storeBytes(at, __builtin_convertvector(bits, Vector<uint16_t, kLanes>));
      }
    }
  }
};

// bfloat16 is the upper half of a float32.
struct Bfloat16Bits {
  template <int kLanes>
  static constexpr bool hasInstruction() {
    return false;
  }

  template <int kLanes>
  SMDDP_INLINE static Vector<float, kLanes> toFloat(Vector<uint32_t, kLanes> bits) {
    return (Vector<float, kLanes>)(bits << 16);
  }
  // Rounds to nearest even. A carry from the largest number gives infinity, which is right. The only NaN that kernels
  // produce has zeros in its lower half, so the addition does not change it.
  template <int kLanes>
  SMDDP_INLINE static Vector<uint32_t, kLanes> fromFloat(Vector<float, kLanes> value) {
    return rounded<kLanes>(value) >> 16;
  }
  // The bits after rounding, before the lower half is dropped.
  template <int kLanes>
  SMDDP_INLINE static Vector<uint32_t, kLanes> rounded(Vector<float, kLanes> value) {
    const auto bits = (Vector<uint32_t, kLanes>)value;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
};

// IEEE binary16: 5 bits of exponent with bias 15, 10 bits of fraction.
struct Float16Bits {
  // The smallest magnitude that rounds to infinity: half-way from the largest number, 65504, to 65536.
  static constexpr int32_t kOverflow = 0x477ff000;        // 65520
  static constexpr int32_t kSmallestNormal = 0x38800000;  // 2^-14
  static constexpr uint32_t kBias = (127u - 15u) << 23;   // between the two exponents

  template <int kLanes>
  SMDDP_INLINE static Vector<float, kLanes> toFloat(Vector<uint32_t, kLanes> half) {
    using Floats = Vector<float, kLanes>;
    using Words = Vector<uint32_t, kLanes>;
    // Compare signed numbers, because SSE2 and AVX2 have no other comparison.
    const auto magnitude = (Vector<int32_t, kLanes>)(half & 0x7fffu);
    const Words shifted = (half & 0x7fffu) << 13;
    // A denormal is a multiple of 2^-24. Put the fraction behind a leading one, so that its last
    // bit has that value, and then subtract the one.
    const Words one = Words{} + (uint32_t)kSmallestNormal;
    const auto denormal = (Words)((Floats)(shifted | one) - (Floats)one);
    const Words bits = magnitude >= 0x7c00   ? shifted | 0x7f800000u
                       : magnitude >= 0x0400 ? shifted + kBias
                                             : denormal;
    return (Floats)(bits | ((half & 0x8000u) << 16));
  }

  // Rounds to nearest even.
  template <int kLanes>
  SMDDP_INLINE static Vector<uint32_t, kLanes> fromFloat(Vector<float, kLanes> value) {
    using Words = Vector<uint32_t, kLanes>;
    const Words bits = (Words)value & 0x7fffffffu;
    const auto magnitude = (Vector<int32_t, kLanes>)bits;
    const Words normal = (bits + 0xfffu + ((bits >> 13) & 1u) - kBias) >> 13;
    // The last bit of numbers around 0.5 has the value 2^-24, as that of denormals. So the addition rounds.
    const Words denormal = (Words)((Vector<float, kLanes>)bits + 0.5f) - 0x3f000000u;
    const Words special = magnitude > 0x7f800000 ? Words{} + 0x7e00u : Words{} + 0x7c00u;
    const Words half = magnitude >= kOverflow         ? special
                       : magnitude >= kSmallestNormal ? normal
                                                      : denormal;
    return half | (((Words)value >> 16) & 0x8000u);
  }

  // g++ 12 warns of an uninitialised variable in the unmasked 512-bit intrinsics. So this uses the masked ones, with
  // all lanes on.
#if defined(__AVX512F__)
  template <int kLanes>
  static constexpr bool hasInstruction() {
    return kLanes == 16;
  }
  template <int kLanes>
  SMDDP_INLINE static Vector<float, 16> loadByInstruction(const uint16_t* from) {
    return (Vector<float, 16>)_mm512_maskz_cvtph_ps(0xffff, loadBytes<__m256i>(from));
  }
  template <int kLanes>
  SMDDP_INLINE static void storeByInstruction(uint16_t* to, Vector<float, 16> value) {
    storeBytes(to, _mm512_maskz_cvtps_ph(0xffff, (__m512)value, _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__F16C__)
  template <int kLanes>
  static constexpr bool hasInstruction() {
    return kLanes == 8;
  }
  template <int kLanes>
  SMDDP_INLINE static Vector<float, 8> loadByInstruction(const uint16_t* from) {
    return (Vector<float, 8>)_mm256_cvtph_ps(loadBytes<__m128i>(from));
  }
  template <int kLanes>
  SMDDP_INLINE static void storeByInstruction(uint16_t* to, Vector<float, 8> value) {
    storeBytes(to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  template <int kLanes>
  static constexpr bool hasInstruction() {
    return false;
  }
#endif
};

using Float16 = Half<Float16Bits>;
using Bfloat16 = Half<Bfloat16Bits>;

}  // namespace
}  // namespace smddp::reduction
