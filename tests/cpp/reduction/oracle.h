// What a reduction should give, one element at a time and as plainly as possible: formats are
// decoded and encoded by arithmetic on their definition, never by moving bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "reduction/reduce.h"

namespace smddp::reduction::oracle {

// Two-byte floats with kFraction bits of fraction; `Stored` is what lies in memory.
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
    // into the exponent by itself, and from the largest number into infinity.
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
T combine(T a, T b, ReduceOp op) {
  if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::MIN) return std::isnan(a) || (a <= b) ? a : b;
    if (op == ReduceOp::MAX) return std::isnan(a) || (a >= b) ? a : b;
    return op == ReduceOp::PRODUCT ? a * b : a + b;
  } else {
    if (op == ReduceOp::MIN) return a <= b ? a : b;
    if (op == ReduceOp::MAX) return a >= b ? a : b;
    // 128 bits hold any result; the conversion keeps it modulo 2^n.
    const __int128 wide =
        op == ReduceOp::PRODUCT ? static_cast<__int128>(a) * b : static_cast<__int128>(a) + b;
    return static_cast<T>(static_cast<unsigned __int128>(wide));
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
    if (scale.pre) input = input * static_cast<Number>(scale.factor);
    result = s == 0 ? input : combine(result, input, op);
  }
  if (scale.post) {
    if constexpr (std::is_floating_point_v<Number>)
      result = result / static_cast<Number>(scale.divisor);
    else
      result = static_cast<Number>(static_cast<int64_t>(result) / scale.divisor);
  }
  return Format::encode(result);
}

// Ordinary numbers, mixed with arbitrary bits (denormals, huge numbers, NaNs) and the edges of the
// type.
template <typename Format>
typename Format::Stored randomElement(std::mt19937_64& random) {
  using Stored = typename Format::Stored;
  using Number = typename Format::Number;
  Stored arbitrary;
  const uint64_t bits = random();
  std::memcpy(&arbitrary, &bits, sizeof arbitrary);
  const uint64_t kind = random() % 8;
  if constexpr (std::is_floating_point_v<Number>) {
    using Limits = std::numeric_limits<Number>;
    const Number edges[] = {0,
                            -Number(0),
                            Limits::infinity(),
                            -Limits::infinity(),
                            Limits::quiet_NaN(),
                            Limits::max(),
                            -Limits::max(),
                            Limits::min(),
                            Limits::denorm_min(),
                            -Limits::denorm_min()};
    if (kind == 0) return arbitrary;
    if (kind == 1) return Format::encode(edges[random() % std::size(edges)]);
    return Format::encode(std::uniform_real_distribution<Number>(-8, 8)(random));
  } else {
    const Number edges[] = {std::numeric_limits<Number>::min(), std::numeric_limits<Number>::max(),
                            Number(0), Number(1), static_cast<Number>(-1)};
    if (kind == 0) return edges[random() % std::size(edges)];
    if (kind < 4) return arbitrary;
    return static_cast<Number>(random() % 100);
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
    case DataType::int32: return f.template operator()<Identity<int32_t>>();
    case DataType::int64: return f.template operator()<Identity<int64_t>>();
    case DataType::uint8: return f.template operator()<Identity<uint8_t>>();
  }
  std::abort();
}

}  // namespace smddp::reduction::oracle
