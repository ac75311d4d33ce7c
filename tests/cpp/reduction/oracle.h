// The oracle: the expected result of a reduction, one element at a time and as simple as possible. It decodes and
// encodes formats by arithmetic from their definition, not by bit operations.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "reduction/reduce.h"

namespace smddp::reduction::oracle {

// Two-byte floats with kFraction bits of fraction; `Stored` is the type in memory.
template <int kExponentBits, int kFraction>
struct SmallFloat {
  using Stored = uint16_t;
  using Number = float;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr uint16_t kInfinity = ((1 << kExponentBits) - 1) << kFraction;
  static constexpr uint16_t kNaN = kInfinity | (1 << (kFraction - 1));

  static float decode(uint16_t bits) {
    const int fraction = bits & ((1 << kFraction) - 1);
    const int exponent = (bits & kInfinity) >> kFraction;
    float magnitude;
    if (exponent == (1 << kExponentBits) - 1)
      magnitude = fraction == 0 ? INFINITY : NAN;
    else if (exponent == 0)
      magnitude = std::ldexp(static_cast<float>(fraction), 1 - kBias - kFraction);
    else
      magnitude =
          std::ldexp(static_cast<float>(fraction + (1 << kFraction)), exponent - kBias - kFraction);
    return (bits & 0x8000) ? -magnitude : magnitude;
  }

  static uint16_t encode(float number) {
    if (std::isnan(number)) return kNaN;
    const uint16_t sign = std::signbit(number) ? 0x8000 : 0;
    const double magnitude = std::fabs(static_cast<double>(number));
    if (magnitude == 0) return sign;
    if (std::isinf(magnitude)) return sign | kInfinity;
    const int exponent = std::max(std::ilogb(magnitude), 1 - kBias);
    // In units of the last place; nearbyint rounds to even. A result of 2^(kFraction + 1) carries
    // into the exponent, and from the largest number into infinity.
    const auto units =
        static_cast<int64_t>(std::nearbyint(std::ldexp(magnitude, kFraction - exponent)));
    const int64_t bits = (static_cast<int64_t>(exponent + kBias - 1) << kFraction) + units;
    return sign | static_cast<uint16_t>(std::min<int64_t>(bits, kInfinity));
  }
};

template <typename T>
struct Identity {
  using Stored = T;
  using Number = T;
  static T decode(T value) { return value; }
  static T encode(T value) {
    if constexpr (std::is_floating_point_v<T>)
      if (std::isnan(value)) return std::numeric_limits<T>::quiet_NaN();
    return value;
  }
};

using Float16 = SmallFloat<5, 10>;
using Bfloat16 = SmallFloat<8, 7>;

template <typename T>
struct Complex {
  using Stored = std::complex<T>;
  using Number = std::complex<T>;
  static Number decode(Stored value) { return value; }
  static Stored encode(Number value) {
    return {Identity<T>::encode(value.real()), Identity<T>::encode(value.imag())};
  }
};

struct Truth {
  using Stored = uint8_t;
  using Number = bool;
  static bool decode(uint8_t value) { return value != 0; }
  static uint8_t encode(bool value) { return value ? 1 : 0; }
};

template <typename Number>
constexpr bool kIsComplex = false;
template <typename T>
constexpr bool kIsComplex<std::complex<T>> = true;

// Types with fractions.
template <typename Number>
constexpr bool kIsInexact = kIsComplex<Number> || std::is_floating_point_v<Number>;

inline bool combineTruths(bool a, bool b, ReduceOp op) {
  if (op == ReduceOp::BXOR) return a != b;
  return op == ReduceOp::PRODUCT || op == ReduceOp::MIN || op == ReduceOp::BAND ? a && b : a || b;
}

template <typename T>
T combine(T a, T b, ReduceOp op) {
  if constexpr (kIsComplex<T>) {
    return {a.real() + b.real(), a.imag() + b.imag()};
  } else if constexpr (std::is_same_v<T, bool>) {
    return combineTruths(a, b, op);
  } else if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::MIN) return std::isnan(a) || (a <= b) ? a : b;
    if (op == ReduceOp::MAX) return std::isnan(a) || (a >= b) ? a : b;
    return op == ReduceOp::PRODUCT ? a * b : a + b;
  } else {
    if (op == ReduceOp::MIN) return a <= b ? a : b;
    if (op == ReduceOp::MAX) return a >= b ? a : b;
    if (op == ReduceOp::BAND) return a & b;
    if (op == ReduceOp::BOR) return a | b;
    if (op == ReduceOp::BXOR) return a ^ b;
    // Compute modulo 2^128, and therefore modulo 2^n; conversions do not change that.
    const auto x = static_cast<unsigned __int128>(a), y = static_cast<unsigned __int128>(b);
    return static_cast<T>(op == ReduceOp::PRODUCT ? x * y : x + y);
  }
}

template <typename Number>
Number scaled(Number value, const Scale& scale) {
  if constexpr (kIsComplex<Number>) {
    const auto factor = static_cast<typename Number::value_type>(scale.factor);
    return {value.real() * factor, value.imag() * factor};
  } else if constexpr (kIsInexact<Number>) {
    return value * static_cast<Number>(scale.factor);
  } else {
    std::abort();  // no other type takes a factor
  }
}

template <typename Number>
Number divided(Number value, double divisor) {
  if constexpr (kIsComplex<Number>) {
    const auto by = static_cast<typename Number::value_type>(divisor);
    return {value.real() / by, value.imag() / by};
  } else if constexpr (kIsInexact<Number>) {
    return value / static_cast<Number>(divisor);
  } else {
    return static_cast<Number>(static_cast<__int128>(value) / static_cast<__int128>(divisor));
  }
}

template <typename Format>
typename Format::Stored element(const std::vector<typename Format::Stored>& inputs, ReduceOp op,
                                const Scale& scale) {
  using Number = typename Format::Number;
  if (inputs.size() == 1 && !scale.pre && !scale.post) return inputs[0];
  Number result{};
  for (size_t s = 0; s < inputs.size(); ++s) {
    Number input = Format::decode(inputs[s]);
    if (scale.pre) input = scaled(input, scale);
    result = s == 0 ? input : combine(result, input, op);
  }
  if (scale.post) result = divided(result, scale.divisor);
  return Format::encode(result);
}

template <typename T>
T randomReal(std::mt19937_64& random) {
  using Limits = std::numeric_limits<T>;
  const T edges[] = {0,
                     -T(0),
                     Limits::infinity(),
                     -Limits::infinity(),
                     Limits::quiet_NaN(),
                     Limits::max(),
                     -Limits::max(),
                     Limits::min(),
                     Limits::denorm_min(),
                     -Limits::denorm_min()};
  if (random() % 7 == 0) return edges[random() % std::size(edges)];
  return std::uniform_real_distribution<T>(-8, 8)(random);
}

template <typename T>
T randomInteger(std::mt19937_64& random) {
  using Limits = std::numeric_limits<T>;
  const T edges[] = {Limits::min(), Limits::max(), 0, 1, static_cast<T>(-1)};
  if (random() % 3 == 0) return edges[random() % std::size(edges)];
  return static_cast<T>(random() % 100);
}

// Ordinary numbers, mixed with the limits of the type and arbitrary bits (denormals, huge numbers,
// NaNs, booleans that are neither 0 nor 1).
template <typename Format>
typename Format::Stored randomElement(std::mt19937_64& random) {
  using Number = typename Format::Number;
  if constexpr (kIsComplex<Number>) {
    using Part = Identity<typename Number::value_type>;
    const auto real = randomElement<Part>(random);
    return {real, randomElement<Part>(random)};
  } else {
    typename Format::Stored arbitrary;
    const uint64_t bits = random();
    std::memcpy(&arbitrary, &bits, sizeof arbitrary);
    if (random() % (kIsInexact<Number> ? 8 : 3) == 0) return arbitrary;
    if constexpr (std::is_same_v<Number, bool>)
      return random() % 2;
    else if constexpr (kIsInexact<Number>)
      return Format::encode(randomReal<Number>(random));
    else
      return randomInteger<Number>(random);
  }
}

// Calls f with the oracle's format of a data type as template argument.
template <typename F>
auto withFormat(DataType type, F&& f) {
  switch (type) {
    case DataType::float32: return f.template operator()<Identity<float>>();
    case DataType::float64: return f.template operator()<Identity<double>>();
    case DataType::float16: return f.template operator()<Float16>();
    case DataType::bfloat16: return f.template operator()<Bfloat16>();
    case DataType::complex64: return f.template operator()<Complex<float>>();
    case DataType::complex128: return f.template operator()<Complex<double>>();
    case DataType::int8: return f.template operator()<Identity<int8_t>>();
    case DataType::int16: return f.template operator()<Identity<int16_t>>();
    case DataType::int32: return f.template operator()<Identity<int32_t>>();
    case DataType::int64: return f.template operator()<Identity<int64_t>>();
    case DataType::uint8: return f.template operator()<Identity<uint8_t>>();
    case DataType::uint16: return f.template operator()<Identity<uint16_t>>();
    case DataType::uint32: return f.template operator()<Identity<uint32_t>>();
    case DataType::uint64: return f.template operator()<Identity<uint64_t>>();
    case DataType::boolean: return f.template operator()<Truth>();
  }
  std::abort();
}

}  // namespace smddp::reduction::oracle
