// The kernels of reduceEncoded(). The formats are described in encoded.h. This file is a part of kernels.inl.h; what is
// said there about unnamed namespaces and builtins applies here.
//
// A kernel works on one block after the other, so a block stays in the first-level cache while it is read, summed,
// encoded, decoded and written. Blocks have a fixed number of elements. A last block with fewer is filled up with zeros
// in memory of the kernel. These stay zeros, or become NaNs where the scale of a source is not finite. Then the
// elements are not finite either, so what is behind them changes no encoded block.
#pragma once

#include "reduction/kernel_table.h"
#include "reduction/number_formats.inl.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace smddp::reduction {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers travel as they are in memory");

using Byte = unsigned char;
constexpr int kBlock = (int)kBlockElements;
constexpr size_t kBlockBytes = kBlockElements * sizeof(float);

// Vectors go in groups of four: so many vectors of float32 make one of bytes.
constexpr int kWidth = kRegisterBytes / (int)sizeof(float);
constexpr int kGroup = 4;
constexpr int kGroupElements = kGroup * kWidth;
static_assert(kBlock % kGroupElements == 0);
using Floats = Vector<float, kWidth>;
using Words = Vector<uint32_t, kWidth>;
using Ints = Vector<int32_t, kWidth>;

constexpr int32_t kMagnitude = 0x7fffffff;  // all bits of a float32 but its sign
constexpr int32_t kInfinity = 0x7f800000;
constexpr int32_t kNaN = 0x7fc00000;  // the canonical one

// Magnitudes have the same order as their bits, NaN above infinity. Signed, because SSE2 and AVX2 compare no others.
SMDDP_INLINE Ints magnitudeOf(Floats x) { return (Ints)x & kMagnitude; }

SMDDP_INLINE Floats loadFloats(const Byte* block, int i) {
  return loadBytes<Floats>(block + i * sizeof(float));
}
SMDDP_INLINE void storeFloats(Byte* block, int i, Floats value) {
  storeBytes(block + i * sizeof(float), value);
}

// Stores a decoded vector, or adds it to what is there.
template <bool kAdd>
SMDDP_INLINE void take(Byte* block, int i, Floats value) {
  if constexpr (kAdd) value = loadFloats(block, i) + value;
  storeFloats(block, i, value);
}

// Stores a group of vectors with one byte for each lane, or two vectors with two. Every lane must fit. What compilers
// make of a conversion is good with AVX-512 only.
SMDDP_INLINE void storeAsBytes(Byte* to, const Ints (&from)[kGroup]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32((__m256i)from[0], (__m256i)from[1]),
                                            _mm256_packs_epi32((__m256i)from[2], (__m256i)from[3]));
  // The two halves of a register are packed for themselves.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  storeBytes(to, _mm256_permutevar8x32_epi32(packed, order));
#elif defined(__SSE2__) && !defined(__AVX512F__)
  storeBytes(to, _mm_packs_epi16(_mm_packs_epi32((__m128i)from[0], (__m128i)from[1]),
                                 _mm_packs_epi32((__m128i)from[2], (__m128i)from[3])));
#else
  for (int v = 0; v < kGroup; ++v)
    storeBytes(to + v * kWidth, __builtin_convertvector(from[v], Vector<int8_t, kWidth>));
#endif
}
SMDDP_INLINE void storeAsHalves(Byte* to, Ints lower, Ints upper) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i packed = _mm256_packs_epi32((__m256i)lower, (__m256i)upper);
  storeBytes(to, _mm256_permute4x64_epi64(packed, 0xd8));
#elif defined(__SSE2__) && !defined(__AVX512F__)
  storeBytes(to, _mm_packs_epi32((__m128i)lower, (__m128i)upper));
#else
  using Shorts = Vector<int16_t, kWidth>;
  storeBytes(to, __builtin_convertvector(lower, Shorts));
  storeBytes(to + sizeof(Shorts), __builtin_convertvector(upper, Shorts));
#endif
}

// The reverse. From AVX2 on compilers convert halves well, but bytes badly. The comment on intrinsics in
// number_formats.inl.h says why the 512-bit one has a mask.
SMDDP_INLINE void loadAsBytes(const Byte* from, Ints (&to)[kGroup]) {
#if defined(__AVX512F__)
  for (int v = 0; v < kGroup; ++v)
    to[v] = (Ints)_mm512_maskz_cvtepi8_epi32(0xffff, loadBytes<__m128i>(from + v * kWidth));
#elif defined(__AVX2__)
  for (int v = 0; v < kGroup; ++v)
    to[v] = (Ints)_mm256_cvtepi8_epi32(_mm_set1_epi64x(loadBytes<int64_t>(from + v * kWidth)));
#elif defined(__SSE2__)
  // The byte becomes the highest one of its lane, and the shift extends its sign.
  const __m128i bytes = loadBytes<__m128i>(from);
  const __m128i lower = _mm_unpacklo_epi8(bytes, bytes), upper = _mm_unpackhi_epi8(bytes, bytes);
  to[0] = (Ints)_mm_unpacklo_epi16(lower, lower) >> 24;
  to[1] = (Ints)_mm_unpackhi_epi16(lower, lower) >> 24;
  to[2] = (Ints)_mm_unpacklo_epi16(upper, upper) >> 24;
  to[3] = (Ints)_mm_unpackhi_epi16(upper, upper) >> 24;
#else
  using Codes = Vector<int8_t, kWidth>;
  for (int v = 0; v < kGroup; ++v)
    to[v] = __builtin_convertvector(loadBytes<Codes>(from + v * kWidth), Ints);
#endif
}
SMDDP_INLINE void loadAsHalves(const Byte* from, Words& lower, Words& upper) {
#if defined(__SSE2__) && !defined(__AVX2__)
  const __m128i halves = loadBytes<__m128i>(from);
  lower = (Words)_mm_unpacklo_epi16(halves, __m128i{});
  upper = (Words)_mm_unpackhi_epi16(halves, __m128i{});
#else
  using Shorts = Vector<uint16_t, kWidth>;
  lower = __builtin_convertvector(loadBytes<Shorts>(from), Words);
  upper = __builtin_convertvector(loadBytes<Shorts>(from + sizeof(Shorts)), Words);
#endif
}

// Each wire has
//   kBytes, bytesOf(n)   the bytes of a whole block, and of one with n elements
//   encode(block, to)    float32 to bytes
//   decode(from, block)  bytes to float32; with kAdd adds them to what is in the block
//   kMakesOneNaN         whether encode() makes every NaN the same

struct Fp32Wire {
  static constexpr size_t kBytes = kBlockBytes;
  static constexpr bool kMakesOneNaN = false;
  static size_t bytesOf(size_t n) { return n * sizeof(float); }

  template <bool kAdd>
  static void decode(const Byte* from, Byte* block) {
    for (int i = 0; i < kBlock; i += kWidth) take<kAdd>(block, i, loadFloats(from, i));
  }
  static void encode(const Byte* block, Byte* to) { decode<false>(block, to); }
};

struct Bf16Wire {
  static constexpr size_t kBytes = kBlockElements * sizeof(uint16_t);
  static constexpr bool kMakesOneNaN = true;
  static size_t bytesOf(size_t n) { return n * sizeof(uint16_t); }

  template <bool kAdd>
  static void decode(const Byte* from, Byte* block) {
    for (int i = 0; i < kBlock; i += 2 * kWidth) {
      Words lower, upper;
      loadAsHalves(from + i * sizeof(uint16_t), lower, upper);
      take<kAdd>(block, i, Bfloat16Bits::toFloat<kWidth>(lower));
      take<kAdd>(block, i + kWidth, Bfloat16Bits::toFloat<kWidth>(upper));
    }
  }

  static void encode(const Byte* block, Byte* to) {
    for (int i = 0; i < kBlock; i += 2 * kWidth)
      storeAsHalves(to + i * sizeof(uint16_t), upperHalf(loadFloats(block, i)),
                    upperHalf(loadFloats(block, i + kWidth)));
  }

 private:
  // With the sign extended.
  SMDDP_INLINE static Ints upperHalf(Floats x) {
    const Floats oneNaN = x == x ? x : (Floats)(Ints{} + kNaN);
    return (Ints)Bfloat16Bits::rounded<kWidth>(oneNaN) >> 16;
  }
};

struct Int8Wire {
  static constexpr size_t kBytes = sizeof(float) + kBlockElements;
  static constexpr bool kMakesOneNaN = true;
  static size_t bytesOf(size_t n) { return sizeof(float) + n; }

  template <bool kAdd>
  static void decode(const Byte* from, Byte* block) {
    const auto scale = loadBytes<int32_t>(from);
    int32_t magnitude = scale & kMagnitude;
    // Infinity times zero would be a NaN whose sign depends on the processor.
    if (magnitude >= kInfinity) magnitude = kNaN;
    if (scale < 0)
      multiply<kAdd, true>(from + sizeof scale, (Floats)(Ints{} + magnitude), block);
    else
      multiply<kAdd, false>(from + sizeof scale, (Floats)(Ints{} + magnitude), block);
  }

  static void encode(const Byte* block, Byte* to) {
    int32_t largest = largestMagnitude<false>(block);
    const bool special = largest >= kInfinity;
    if (special) largest = largestMagnitude<true>(block);
    if (largest > kLargest) largest = kLargest;
    const float m = floatOf(largest), range = special ? 126 : 127;
    float scale = 0, factor = 0;
    if (largest >= kSmallest) {
      scale = m / range;
      factor = range / m;
    }
    storeBytes(to, special ? -scale : scale);
    if (special)
      divide<true>(block, Floats{} + factor, to + sizeof scale);
    else
      divide<false>(block, Floats{} + factor, to + sizeof scale);
  }

 private:
  static constexpr int32_t kSmallest = (127 - 100) << 23;  // 2^-100
  static constexpr int32_t kLargest = 0x7f7fffef;          // FLT_MAX * (1 - 2^-20)
  // The codes of what is not finite.
  static constexpr int32_t kPlusInfinity = 127;
  static constexpr int32_t kMinusInfinity = -127;
  static constexpr int32_t kNotANumber = -128;

  SMDDP_INLINE static float floatOf(int32_t bits) { return __builtin_bit_cast(float, bits); }

  template <int kLanes>
  SMDDP_INLINE static int32_t largestLane(Vector<int32_t, kLanes> v) {
    if constexpr (kLanes == 1) {
      return v[0];
    } else {
      using Part = Vector<int32_t, kLanes / 2>;
      const Part a = loadBytes<Part>(&v), b = loadBytes<Part>((const Byte*)&v + sizeof(Part));
      return largestLane<kLanes / 2>(a > b ? a : b);
    }
  }

  // The bits of the largest magnitude, with kFinite that of finite numbers only.
  template <bool kFinite>
  SMDDP_INLINE static int32_t largestMagnitude(const Byte* block) {
    // Several, so that a comparison need not wait for the one before.
    Ints largest[kGroup] = {};
    for (int i = 0; i < kBlock; i += kGroupElements)
      for (int v = 0; v < kGroup; ++v) {
        Ints magnitude = magnitudeOf(loadFloats(block, i + v * kWidth));
        if constexpr (kFinite) magnitude = magnitude < kInfinity ? magnitude : Ints{};
        largest[v] = magnitude > largest[v] ? magnitude : largest[v];
      }
    for (int v = 1; v < kGroup; ++v) largest[0] = largest[v] > largest[0] ? largest[v] : largest[0];
    return largestLane<kWidth>(largest[0]);
  }

  // Codes of a block. The rounded product of m and the factor is below 127.0002, or 126.0002, so no code leaves its
  // range.
  template <bool kSpecial>
  SMDDP_INLINE static void divide(const Byte* block, Floats factor, Byte* codes) {
    for (int i = 0; i < kBlock; i += kGroupElements) {
      Ints group[kGroup];
      for (int v = 0; v < kGroup; ++v) {
        const Floats x = loadFloats(block, i + v * kWidth);
        // The last bit of numbers around 1.5 * 2^23 has the value 1. So the addition rounds to an integer.
        constexpr float kRound = 0x1.8p23f;
        const Floats rounded = x * factor + kRound;
        group[v] = (Ints)rounded - __builtin_bit_cast(int32_t, kRound);
        if constexpr (kSpecial) {
          const Ints magnitude = magnitudeOf(x);
          const Ints infinity = (Ints)x < 0 ? Ints{} + kMinusInfinity : Ints{} + kPlusInfinity;
          group[v] = magnitude < kInfinity    ? group[v]
                     : magnitude == kInfinity ? infinity
                                              : Ints{} + kNotANumber;
        }
      }
      storeAsBytes(codes + i, group);
    }
  }

  template <bool kAdd, bool kSpecial>
  SMDDP_INLINE static void multiply(const Byte* codes, Floats scale, Byte* block) {
    for (int i = 0; i < kBlock; i += kGroupElements) {
      Ints group[kGroup];
      loadAsBytes(codes + i, group);
      for (int v = 0; v < kGroup; ++v) {
        Floats x = __builtin_convertvector(group[v], Floats) * scale;
        if constexpr (kSpecial) {
          const Ints bits = group[v] == kPlusInfinity    ? Ints{} + kInfinity
                            : group[v] == kMinusInfinity ? Ints{} + (int32_t)(kInfinity | 1u << 31)
                            : group[v] == kNotANumber    ? Ints{} + kNaN
                                                         : (Ints)x;
          x = (Floats)bits;
        }
        take<kAdd>(block, i + v * kWidth, x);
      }
    }
  }
};

// One block of a job.
struct BlockRange {
  size_t first;  // its first element
  size_t count;  // of its elements
  bool isWhole() const { return count == kBlockElements; }
};

template <typename Format>
SMDDP_INLINE size_t offsetOf(BlockRange range) {
  return range.first / kBlockElements * Format::kBytes;
}

// A block of a source or the residual: where it is, or, if it is not whole, in `filled`, with zeros behind.
template <typename Format>
SMDDP_INLINE const Byte* readBlock(const void* data, BlockRange range, Byte* filled) {
  const Byte* from = (const Byte*)data + offsetOf<Format>(range);
  if (range.isWhole()) return from;
  __builtin_memset(filled, 0, Format::kBytes);
  __builtin_memcpy(filled, from, Format::bytesOf(range.count));
  return filled;
}

template <typename Format>
SMDDP_INLINE void writeBlock(const Byte* from, void* data, BlockRange range) {
  Byte* to = (Byte*)data + offsetOf<Format>(range);
  if (to == from) return;
  if (range.isWhole())
    __builtin_memcpy(to, from, Format::kBytes);
  else
    __builtin_memcpy(to, from, Format::bytesOf(range.count));
}

template <typename Format>
SMDDP_INLINE void writeDecoded(const Byte* from, void* data, BlockRange range, Byte* decoded) {
  if (range.isWhole())
    return Format::template decode<false>(from, (Byte*)data + offsetOf<Fp32Wire>(range));
  Format::template decode<false>(from, decoded);
  writeBlock<Fp32Wire>(decoded, data, range);
}

// Finishes sums: divides, adds the residual. A NaN becomes the canonical one, as in kernels of reduce().
template <bool kDivides, bool kHasResidual>
SMDDP_INLINE void finishBlock(Byte* sums, float divisor, const Byte* residual) {
  for (int i = 0; i < kBlock; i += kWidth) {
    Floats x = loadFloats(sums, i);
    if constexpr (kDivides) x = x / divisor;
    if constexpr (kHasResidual) x = x + loadFloats(residual, i);
    storeFloats(sums, i, x == x ? x : (Floats)(Ints{} + kNaN));
  }
}

// lost = exact - decoded, which may be the same memory as `lost`.
SMDDP_INLINE void subtractBlock(const Byte* exact, const Byte* decoded, Byte* lost) {
  for (int i = 0; i < kBlock; i += kWidth) {
    const Floats x = loadFloats(exact, i) - loadFloats(decoded, i);
    storeFloats(lost, i, magnitudeOf(x) < kInfinity ? x : Floats{});
  }
}

// Aligned for the widest registers.
struct alignas(64) BlockMemory {
  Byte bytes[kBlockBytes];
};

// Adds a source to the sums. The first one, without kAdd, sets them.
template <typename Format, bool kAdd>
SMDDP_INLINE void addSource(const Source& src, BlockRange range, Byte* sums, Byte* spare) {
  if (src.isEncoded)
    Format::template decode<kAdd>(readBlock<Format>(src.data, range, spare), sums);
  else
    Fp32Wire::decode<kAdd>(readBlock<Fp32Wire>(src.data, range, spare), sums);
}

template <typename Format>
void encodedKernel(const EncodedJob& job) {
  const Destination* target = nullptr;  // the first one that is encoded
  for (size_t d = job.numDsts; d-- > 0;)
    if (job.dsts[d].isEncoded) target = &job.dsts[d];
  const bool computes = job.numSrcs > 1 || job.divides || job.residual != nullptr;
  BlockMemory sums, code, decoded, spare;
  for (BlockRange range{0, 0}; range.first < job.count; range.first += kBlockElements) {
    const size_t left = job.count - range.first;
    range.count = left < kBlockElements ? left : kBlockElements;

    // The result. All sources are read before anything is written, so a destination may be a source.
    const Byte* plain = nullptr;
    const Byte* encoded = nullptr;
    if (computes) {
      addSource<Format, false>(job.srcs[0], range, sums.bytes, spare.bytes);
      for (size_t s = 1; s < job.numSrcs; ++s)
        addSource<Format, true>(job.srcs[s], range, sums.bytes, spare.bytes);
      const float divisor = (float)job.divisor;
      if (job.residual != nullptr) {
        const Byte* residual = readBlock<Fp32Wire>(job.residual, range, spare.bytes);
        if (job.divides)
          finishBlock<true, true>(sums.bytes, divisor, residual);
        else
          finishBlock<false, true>(sums.bytes, divisor, residual);
      } else if (job.divides) {
        finishBlock<true, false>(sums.bytes, divisor, nullptr);
      } else if (target == nullptr || !Format::kMakesOneNaN) {
        finishBlock<false, false>(sums.bytes, divisor, nullptr);
      }
      plain = sums.bytes;
    } else if (job.srcs[0].isEncoded) {
      encoded = readBlock<Format>(job.srcs[0].data, range, spare.bytes);
    } else {
      plain = readBlock<Fp32Wire>(job.srcs[0].data, range, spare.bytes);
    }
    if (target != nullptr && encoded == nullptr) {
      // To read bytes soon after they were stored in other pieces is slow. So they are not stored here first.
      Byte* to = range.isWhole() ? (Byte*)target->data + offsetOf<Format>(range) : code.bytes;
      Format::encode(plain, to);
      encoded = to;
    }
    if (job.residual != nullptr) {
      Format::template decode<false>(encoded, decoded.bytes);
      Byte* residual = (Byte*)job.residual + offsetOf<Fp32Wire>(range);
      if (range.isWhole()) {
        subtractBlock(plain, decoded.bytes, residual);
      } else {
        subtractBlock(plain, decoded.bytes, decoded.bytes);
        writeBlock<Fp32Wire>(decoded.bytes, job.residual, range);
      }
    }

    for (size_t d = 0; d < job.numDsts; ++d) {
      const Destination& dst = job.dsts[d];
      if (dst.isEncoded)
        writeBlock<Format>(encoded, dst.data, range);
      else if (encoded != nullptr)
        writeDecoded<Format>(encoded, dst.data, range, decoded.bytes);
      else
        writeBlock<Fp32Wire>(plain, dst.data, range);
    }
  }
}

}  // namespace
}  // namespace smddp::reduction
