// Number formats and edge cases, with single values.
#include <bit>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "reduction/odd_float_mode.h"
#include "reduction/oracle.h"
#include "reduction/reduce_one.h"
#include "support/effort.h"

namespace smddp::reduction {
namespace {

template <typename Format>
class HalfTest : public testing::Test {
 public:
  static constexpr DataType kType =
      std::is_same_v<Format, oracle::Float16> ? DataType::float16 : DataType::bfloat16;
};
using HalfFormats = testing::Types<oracle::Float16, oracle::Bfloat16>;
TYPED_TEST_SUITE(HalfTest, HalfFormats);

// In both formats non-negative numbers have the same order as their bits.
TYPED_TEST(HalfTest, EveryValueSurvivesARoundTrip) {
  const test::Share share = test::shareUnderSanitizers();
  for (uint64_t bits = share.first; bits <= 0xffff; bits += share.step) {
    const bool isNaN = (bits & 0x7fff) > TypeParam::kInfinity;
    const uint16_t expected = isNaN ? TypeParam::kNaN : bits;
    const Scale computed{.post = true,
                         .divisor = 1};  // forces a computation; a plain copy would prove nothing
    ASSERT_EQ(reduceOne<uint16_t>(this->kType, {uint16_t(bits)}, ReduceOp::AVG, computed),
              expected);
  }
}

TYPED_TEST(HalfTest, EveryValueAddsAsTheOracleSays) {
  const test::Share share = test::shareUnderSanitizers();
  for (float second : {-0.0f, 1.0f, -1.0f, 0x1p-24f, 0x1p-14f, 0x1p-133f, 3.14159f, 65504.0f}) {
    const uint16_t other = TypeParam::encode(second);
    for (uint64_t bits = share.first; bits <= 0xffff; bits += share.step) {
      const std::vector<uint16_t> inputs{uint16_t(bits), other};
      ASSERT_EQ(reduceOne<uint16_t>(this->kType, inputs, ReduceOp::SUM),
                oracle::element<TypeParam>(inputs, ReduceOp::SUM, {}))
          << bits << " + " << second;
    }
  }
}

// The value half-way between two neighbours is rounded to the even one; a float32 next to it to the nearer one.
TYPED_TEST(HalfTest, RoundsToNearestEven) {
  const test::Share share = test::shareUnderSanitizers();
  const uint16_t one = TypeParam::encode(1.0f);
  const auto round = [&](float value) {
    const Scale scale{.pre = true, .factor = value};
    return reduceOne<uint16_t>(this->kType, {one}, ReduceOp::PREMUL_SUM, scale);
  };
  for (uint64_t bits = share.first; bits < TypeParam::kInfinity; bits += share.step) {
    const uint16_t lower = bits, upper = bits + 1;
    // The largest number has no upper neighbour. Rounding continues with the same distance as below it.
    const float from = TypeParam::decode(lower);
    const float half = upper < TypeParam::kInfinity ? (TypeParam::decode(upper) - from) / 2
                                                    : (from - TypeParam::decode(lower - 1)) / 2;
    const float middle = from + half;
    ASSERT_EQ(round(middle), lower % 2 == 0 ? lower : upper)
        << "between " << lower << ", " << upper;
    ASSERT_EQ(round(-middle), 0x8000 | (lower % 2 == 0 ? lower : upper));
    ASSERT_EQ(round(std::nextafter(middle, 0.0f)), lower);
    ASSERT_EQ(round(std::nextafter(middle, INFINITY)), upper);
  }
}

TEST(SpecialValues, HalvesAreSummedInFloat32) {
  const auto sum16 = [](std::vector<float> inputs) {
    std::vector<uint16_t> bits;
    for (float input : inputs) bits.push_back(oracle::Float16::encode(input));
    return oracle::Float16::decode(reduceOne(DataType::float16, bits, ReduceOp::SUM));
  };
  EXPECT_EQ(sum16({2048, 1, 1}), 2050);             // rounding every step would give 2048
  EXPECT_EQ(sum16({65504, 65504, -65504}), 65504);  // an intermediate overflow
  EXPECT_EQ(sum16({65504, 15}), 65504);
  EXPECT_EQ(sum16({65504, 16}), INFINITY);  // half-way to what would be the next number
  EXPECT_EQ(sum16({-65504, -65504}), -INFINITY);
}

TEST(SpecialValues, FloatsFollowIeee) {
  const float inf = INFINITY, nan = NAN, tiny = std::numeric_limits<float>::denorm_min();
  const auto bits = [](float a, float b, ReduceOp op) {
    return std::bit_cast<uint32_t>(reduceOne<float>(DataType::float32, {a, b}, op));
  };
  const auto bitsOf = [](float value) { return std::bit_cast<uint32_t>(value); };
  EXPECT_EQ(bits(inf, -inf, ReduceOp::SUM), 0x7fc00000u);
  EXPECT_EQ(bits(-nan, std::nanf("0x1234"), ReduceOp::SUM), 0x7fc00000u);
  EXPECT_EQ(bits(-0.0f, -0.0f, ReduceOp::SUM), bitsOf(-0.0f));
  EXPECT_EQ(bits(-0.0f, 0.0f, ReduceOp::SUM), bitsOf(0.0f));
  EXPECT_EQ(bits(tiny, tiny, ReduceOp::SUM), 2u);
  EXPECT_EQ(bits(std::numeric_limits<float>::max(), 1e38f, ReduceOp::SUM), bitsOf(inf));
  for (ReduceOp op : {ReduceOp::MIN, ReduceOp::MAX}) {
    EXPECT_EQ(bits(1, nan, op), 0x7fc00000u);
    EXPECT_EQ(bits(nan, 1, op), 0x7fc00000u);
    EXPECT_EQ(bits(-0.0f, 0.0f, op), bitsOf(-0.0f));
    EXPECT_EQ(bits(0.0f, -0.0f, op), bitsOf(0.0f));
  }
  EXPECT_EQ(bits(-inf, 3, ReduceOp::MIN), bitsOf(-inf));
  EXPECT_EQ(bits(inf, 0, ReduceOp::PRODUCT), 0x7fc00000u);
}

TEST(SpecialValues, IntegersWrapAndTruncate) {
  constexpr int32_t kMin = INT32_MIN, kMax = INT32_MAX;
  constexpr int64_t kMin64 = INT64_MIN;
  const Scale half{.post = true, .divisor = 2};
  const Scale by300{.post = true, .divisor = 300};
  const auto of32 = [](std::vector<int32_t> inputs, ReduceOp op, const Scale& scale) {
    return reduceOne(DataType::int32, inputs, op, scale);
  };
  const auto of8 = [](std::vector<uint8_t> inputs, ReduceOp op, const Scale& scale) {
    return reduceOne(DataType::uint8, inputs, op, scale);
  };
  EXPECT_EQ(of32({kMax, 1}, ReduceOp::SUM, {}), kMin);
  EXPECT_EQ(of32({kMin, -1}, ReduceOp::PRODUCT, {}), kMin);
  EXPECT_EQ(of32({-3, -4}, ReduceOp::AVG, half), -3);
  EXPECT_EQ(of32({kMax, 1}, ReduceOp::AVG, half), kMin / 2);
  EXPECT_EQ(of32({kMin, kMax}, ReduceOp::MIN, {}), kMin);
  EXPECT_EQ(reduceOne<int64_t>(DataType::int64, {kMin64, kMin64}, ReduceOp::SUM), 0);
  EXPECT_EQ(of8({200, 100}, ReduceOp::SUM, {}), 44);
  EXPECT_EQ(of8({200, 100}, ReduceOp::MAX, {}), 200);
  EXPECT_EQ(of8({100, 100}, ReduceOp::AVG, by300), 0);
}

TEST(SpecialValues, UnsignedAreNotSigned) {
  constexpr uint64_t kMax = UINT64_MAX;
  const Scale third{.post = true, .divisor = 3};
  const auto of64 = [](std::vector<uint64_t> inputs, ReduceOp op, const Scale& scale) {
    return reduceOne(DataType::uint64, inputs, op, scale);
  };
  EXPECT_EQ(of64({kMax - 5, 5}, ReduceOp::AVG, third), kMax / 3);
  EXPECT_EQ(of64({kMax, 1}, ReduceOp::MAX, {}), kMax);
  EXPECT_EQ(of64({kMax, 1}, ReduceOp::MIN, {}), 1u);
  EXPECT_EQ(reduceOne<int8_t>(DataType::int8, {-100, 1}, ReduceOp::MIN), -100);
  EXPECT_EQ(reduceOne<int8_t>(DataType::int8, {-7, 0}, ReduceOp::AVG, third), -2);
  EXPECT_EQ(reduceOne<int16_t>(DataType::int16, {-3, 0x0f0f}, ReduceOp::BAND), 0x0f0d);
}

// This must also hold for bytes that are neither 0 nor 1.
TEST(SpecialValues, TruthValuesAreZeroOrOne) {
  const auto of = [](std::vector<uint8_t> inputs, ReduceOp op) {
    return reduceOne(DataType::boolean, inputs, op);
  };
  for (ReduceOp anyOf : {ReduceOp::SUM, ReduceOp::MAX, ReduceOp::BOR}) {
    EXPECT_EQ(of({0, 0, 0}, anyOf), 0);
    EXPECT_EQ(of({0, 1, 1}, anyOf), 1);
    EXPECT_EQ(of({0, 2, 4}, anyOf), 1);
  }
  for (ReduceOp allOf : {ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::BAND}) {
    EXPECT_EQ(of({1, 1, 1}, allOf), 1);
    EXPECT_EQ(of({1, 0, 1}, allOf), 0);
    EXPECT_EQ(of({1, 2, 4}, allOf), 1);
  }
  EXPECT_EQ(of({1, 1, 1}, ReduceOp::BXOR), 1);
  EXPECT_EQ(of({1, 255}, ReduceOp::BXOR), 0);
}

TEST(FloatMode, DoesNotReachTheResultAndIsGivenBack) {
#if defined(__x86_64__)
  const float tiny = std::numeric_limits<float>::denorm_min();
  float sum = 0, rounded = 0;
  inOddFloatMode([&] {
    sum = reduceOne<float>(DataType::float32, {tiny, tiny}, ReduceOp::SUM);
    rounded = reduceOne<float>(DataType::float32, {1.0f, 0x1p-30f}, ReduceOp::SUM);
  });
  EXPECT_EQ(std::bit_cast<uint32_t>(sum), 2u);
  EXPECT_EQ(rounded, 1.0f);
#else
  GTEST_SKIP() << "sets the control register of x86-64";
#endif
}

}  // namespace
}  // namespace smddp::reduction
