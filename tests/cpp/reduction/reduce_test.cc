#include "reduction/reduce.h"

#include <array>
#include <bit>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/config.h"
#include "common/error.h"
#include "reduction/float_mode.h"
#include "reduction/kernel_table.h"
#include "reduction/oracle.h"

namespace smddp::reduction {
namespace {

using Bytes = std::vector<std::byte>;

constexpr DataType kTypes[] = {DataType::float32,  DataType::float64, DataType::float16,
                               DataType::bfloat16, DataType::int32,   DataType::int64,
                               DataType::uint8};
constexpr ReduceOp kOps[] = {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT,
                             ReduceOp::MIN, ReduceOp::MAX, ReduceOp::PREMUL_SUM};

std::vector<SimdLevel> availableLevels() {
  std::vector<SimdLevel> levels;
  for (SimdLevel level : {SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512})
    if (kernelsOf(level) != nullptr) levels.push_back(level);
  return levels;
}

// Sources and what they reduce to, element by element; every shorter count is a prefix.
struct Problem {
  DataType type;
  ReduceOp op;
  Scale scale;
  std::vector<Bytes> srcs;
  Bytes expected;
};

Problem makeProblem(DataType type, ReduceOp op, size_t numSrcs, size_t count, uint64_t seed) {
  Problem problem{type, op, {}, {}, {}};
  if (op == ReduceOp::PREMUL_SUM) problem.scale = {.pre = true, .factor = 1.0 / 3};
  if (op == ReduceOp::AVG)
    problem.scale = {.post = true, .divisor = static_cast<int64_t>(numSrcs) + 1};
  oracle::withFormat(type, [&]<typename Format>() {
    using Stored = typename Format::Stored;
    std::mt19937_64 random(seed);
    std::vector<std::vector<Stored>> columns(count, std::vector<Stored>(numSrcs));
    problem.srcs.assign(numSrcs, Bytes(count * sizeof(Stored)));
    problem.expected.resize(count * sizeof(Stored));
    for (size_t i = 0; i < count; ++i) {
      for (size_t s = 0; s < numSrcs; ++s) {
        columns[i][s] = oracle::randomElement<Format>(random);
        std::memcpy(&problem.srcs[s][i * sizeof(Stored)], &columns[i][s], sizeof(Stored));
      }
      const Stored result = oracle::element<Format>(columns[i], op, problem.scale);
      std::memcpy(&problem.expected[i * sizeof(Stored)], &result, sizeof(Stored));
    }
  });
  return problem;
}

// How the buffers of one call lie in memory.
struct Layout {
  size_t count;
  size_t misalignment;  // elements; every buffer is off by another amount
  size_t numDsts;
  bool inPlace;  // the first destinations are sources, in reversed order
};

// Memory for one buffer with a margin on both sides that must stay untouched.
class GuardedBuffer {
 public:
  static constexpr size_t kMargin = 64;
  GuardedBuffer(size_t bytes, size_t offset)
      : offset_(kMargin + offset), bytes_(bytes), memory_(offset_ + bytes + kMargin, kFill) {}
  std::byte* data() { return memory_.data() + offset_; }
  bool holds(const Bytes& prefix) const {
    return std::equal(memory_.begin() + offset_, memory_.begin() + offset_ + bytes_,
                      prefix.begin());
  }
  bool marginsIntact() const {
    const auto isFill = [](std::byte b) { return b == kFill; };
    return std::all_of(memory_.begin(), memory_.begin() + offset_, isFill) &&
           std::all_of(memory_.begin() + offset_ + bytes_, memory_.end(), isFill);
  }

 private:
  static constexpr std::byte kFill{0xa5};
  size_t offset_, bytes_;
  Bytes memory_;
};

// Empty when all destinations are as expected and nothing else was changed, else what is wrong.
std::string check(const Problem& problem, const Layout& layout, const KernelTable& kernels) {
  const size_t element = sizeOf(problem.type), bytes = layout.count * element;
  const size_t numSrcs = problem.srcs.size();
  const size_t shared = layout.inPlace ? std::min(layout.numDsts, numSrcs) : 0;
  std::vector<GuardedBuffer> buffers;
  std::vector<const void*> srcs;
  std::vector<void*> dsts;
  const size_t numBuffers = numSrcs + layout.numDsts - shared;
  for (size_t b = 0; b < numBuffers; ++b)
    buffers.emplace_back(bytes, (layout.misalignment + b * layout.misalignment) % 4 * element);
  for (size_t s = 0; s < numSrcs; ++s) {
    if (bytes > 0) std::memcpy(buffers[s].data(), problem.srcs[s].data(), bytes);
    srcs.push_back(buffers[s].data());
  }
  const auto bufferOfDst = [&](size_t d) {
    return d < shared ? numSrcs - 1 - d : numSrcs + d - shared;
  };
  for (size_t d = 0; d < layout.numDsts; ++d) dsts.push_back(buffers[bufferOfDst(d)].data());

  reduceWith(kernels, dsts, srcs, layout.count, problem.type, problem.op, problem.scale);

  for (size_t d = 0; d < layout.numDsts; ++d)
    if (!buffers[bufferOfDst(d)].holds(problem.expected)) return fmt::format("destination {}", d);
  for (size_t s = 0; s + shared < numSrcs; ++s)
    if (!buffers[s].holds(problem.srcs[s])) return fmt::format("source {} was changed", s);
  for (const GuardedBuffer& buffer : buffers)
    if (!buffer.marginsIntact()) return "wrote outside";
  return "";
}

class ReduceTest : public testing::TestWithParam<std::tuple<DataType, ReduceOp>> {
 protected:
  // Every number of sources and destinations, in place and not, on every level, bit by bit.
  void checkAll(const std::vector<size_t>& counts, const std::vector<size_t>& misalignments) {
    const auto [type, op] = GetParam();
    for (size_t numSrcs : {1, 2, 3, 4, 5, 9}) {
      const uint64_t seed = 1000 * numSrcs + counts.back();
      const Problem problem = makeProblem(type, op, numSrcs, counts.back(), seed);
      for (size_t count : counts)
        for (size_t misalignment : misalignments)
          for (size_t numDsts : {1, 2, 3, 4})
            for (bool inPlace : {false, true})
              for (SimdLevel level : availableLevels()) {
                const Layout layout{count, misalignment, numDsts, inPlace};
                ASSERT_EQ(check(problem, layout, *kernelsOf(level)), "")
                    << toString(level) << " sources " << numSrcs << " destinations " << numDsts
                    << " count " << count << " misalignment " << misalignment << " in place "
                    << inPlace << " seed " << seed;
              }
    }
  }
};

TEST_P(ReduceTest, MatchesTheOracleOnShortVectors) {
  checkAll({0, 1, 3, 7, 16, 17, 63, 64, 65, 1000, 4097}, {0, 1, 2, 3});
}

TEST_P(ReduceTest, MatchesTheOracleOnLongVectors) { checkAll({100003}, {1}); }

std::vector<std::tuple<DataType, ReduceOp>> supportedCells() {
  std::vector<std::tuple<DataType, ReduceOp>> cells;
  for (DataType type : kTypes)
    for (ReduceOp op : kOps)
      if (supports(type, op)) cells.emplace_back(type, op);
  return cells;
}

INSTANTIATE_TEST_SUITE_P(All, ReduceTest, testing::ValuesIn(supportedCells()),
                         [](const auto& info) {
                           return std::string(toString(std::get<0>(info.param))) + "_" +
                                  toString(std::get<1>(info.param));
                         });

// One reduction of single elements, the same on all levels and in every lane: 127 copies go through
// the unrolled loop, the loop of single registers and all parts of the tail.
template <typename T>
T reduceOne(DataType type, std::vector<T> inputs, ReduceOp op, const Scale& scale = {}) {
  constexpr size_t kCopies = 127;
  std::vector<std::vector<T>> sources;
  std::vector<const void*> srcs;
  for (T input : inputs) sources.emplace_back(kCopies, input);
  for (const auto& source : sources) srcs.push_back(source.data());
  std::vector<T> results;
  for (SimdLevel level : availableLevels()) {
    std::array<T, kCopies> result;
    void* dst = result.data();
    reduceWith(*kernelsOf(level), {&dst, 1}, srcs, kCopies, type, op, scale);
    results.insert(results.end(), result.begin(), result.end());
  }
  for (const T& result : results)
    EXPECT_EQ(std::memcmp(&result, &results[0], sizeof(T)), 0) << "lanes or levels differ";
  return results[0];
}

template <typename Format>
class HalfTest : public testing::Test {
 public:
  static constexpr DataType kType =
      std::is_same_v<Format, oracle::Float16> ? DataType::float16 : DataType::bfloat16;
};
using HalfFormats = testing::Types<oracle::Float16, oracle::Bfloat16>;
TYPED_TEST_SUITE(HalfTest, HalfFormats);

// Both formats order their non-negative numbers as their bits.
TYPED_TEST(HalfTest, EveryValueSurvivesARoundTrip) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const bool isNaN = (bits & 0x7fff) > TypeParam::kInfinity;
    const uint16_t expected = isNaN ? TypeParam::kNaN : bits;
    const Scale computed{.post = true, .divisor = 1};  // a plain copy would prove nothing
    ASSERT_EQ(reduceOne<uint16_t>(this->kType, {uint16_t(bits)}, ReduceOp::AVG, computed),
              expected);
  }
}

TYPED_TEST(HalfTest, EveryValueAddsAsTheOracleSays) {
  for (float second : {-0.0f, 1.0f, -1.0f, 0x1p-24f, 0x1p-14f, 0x1p-133f, 3.14159f, 65504.0f}) {
    const uint16_t other = TypeParam::encode(second);
    for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
      const std::vector<uint16_t> inputs{uint16_t(bits), other};
      ASSERT_EQ(reduceOne<uint16_t>(this->kType, inputs, ReduceOp::SUM),
                oracle::element<TypeParam>(inputs, ReduceOp::SUM, {}))
          << bits << " + " << second;
    }
  }
}

// The point half-way between two neighbours goes to the even one; a float32 just off it does not.
TYPED_TEST(HalfTest, RoundsToNearestEven) {
  const uint16_t one = TypeParam::encode(1.0f);
  const auto round = [&](float value) {
    const Scale scale{.pre = true, .factor = value};
    return reduceOne<uint16_t>(this->kType, {one}, ReduceOp::PREMUL_SUM, scale);
  };
  for (uint32_t bits = 0; bits < TypeParam::kInfinity; ++bits) {
    const uint16_t lower = bits, upper = bits + 1;
    // Above the largest number there is no neighbour, but the grid goes on: use the distance below.
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

TEST(Scale, IsAppliedOnlyWhereItIsDue) {
  const std::vector<float> inputs{3, 4};
  const Scale factor{.pre = true, .factor = 0.5}, divisor{.post = true, .divisor = 4};
  const auto of = [&](ReduceOp op, const Scale& scale) {
    return reduceOne(DataType::float32, inputs, op, scale);
  };
  EXPECT_EQ(of(ReduceOp::PREMUL_SUM, factor), 3.5f);
  EXPECT_EQ(of(ReduceOp::PREMUL_SUM, {.factor = 0.5}), 7.0f);
  EXPECT_EQ(of(ReduceOp::AVG, divisor), 1.75f);
  EXPECT_EQ(of(ReduceOp::AVG, {.divisor = 4}), 7.0f);
}

TEST(FloatMode, DoesNotReachTheResultAndIsGivenBack) {
#if defined(__x86_64__)
  const uint32_t before = _mm_getcsr();
  const uint32_t odd = 0x1f80 | 0x8040 | 0x4000;  // flush and ignore denormals, round up
  const float tiny = std::numeric_limits<float>::denorm_min();
  _mm_setcsr(odd);
  const float sum = reduceOne<float>(DataType::float32, {tiny, tiny}, ReduceOp::SUM);
  const float rounded = reduceOne<float>(DataType::float32, {1.0f, 0x1p-30f}, ReduceOp::SUM);
  const uint32_t after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(std::bit_cast<uint32_t>(sum), 2u);
  EXPECT_EQ(rounded, 1.0f);
  EXPECT_EQ(after & ~0x3fu, odd);
#else
  GTEST_SKIP() << "sets the control register of x86-64";
#endif
}

TEST(Reduce, RefusesWhatHasNoMeaningBeforeWriting) {
  std::vector<int32_t> a{1}, b{2}, out{-1};
  const void* srcs[] = {a.data(), b.data()};
  void* dsts[] = {out.data()};
  EXPECT_THROW(reduce(dsts, srcs, 1, DataType::int32, ReduceOp::PREMUL_SUM, {.pre = true}), Error);
  EXPECT_THROW(reduce(dsts, {}, 1, DataType::int32, ReduceOp::SUM), Error);
  EXPECT_THROW(reduce(dsts, srcs, 1, DataType::int32, ReduceOp::SUM, {.post = true}), Error);
  EXPECT_THROW(reduce(dsts, srcs, 1, DataType::int32, ReduceOp::AVG, {.divisor = 0}), Error);
  EXPECT_EQ(out[0], -1);
}

TEST(Reduce, SupportsEverythingButFactorsOfIntegers) {
  for (DataType type : kTypes)
    for (ReduceOp op : kOps) {
      const bool isInteger =
          type == DataType::int32 || type == DataType::int64 || type == DataType::uint8;
      EXPECT_EQ(supports(type, op), !(isInteger && op == ReduceOp::PREMUL_SUM))
          << toString(type) << " " << toString(op);
    }
}

// Run once more with SMDDP_SIMD=scalar; see CMakeLists.txt.
TEST(Level, FollowsTheSetting) {
  const std::string& wanted = settings().simd;
  if (wanted == "auto")
    EXPECT_EQ(simdLevel(), availableLevels().back());
  else
    EXPECT_EQ(toString(simdLevel()), wanted);
  std::vector<float> a{1}, b{2}, out{0};
  const void* srcs[] = {a.data(), b.data()};
  void* dsts[] = {out.data()};
  reduce(dsts, srcs, 1, DataType::float32, ReduceOp::SUM);
  EXPECT_EQ(out[0], 3);
}

TEST(Level, UnknownOrMissingOnesAreUsageErrors) {
  EXPECT_EQ(parseSimdLevel("scalar"), SimdLevel::Scalar);
  const auto textOf = [](std::string_view wanted) -> std::string {
    try {
      parseSimdLevel(wanted);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::Usage);
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(textOf("sse9"), testing::HasSubstr("SMDDP_SIMD=sse9"));
  for (SimdLevel level : {SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512})
    EXPECT_EQ(textOf(toString(level)).empty(), kernelsOf(level) != nullptr);
}

}  // namespace
}  // namespace smddp::reduction
