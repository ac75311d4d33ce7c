#include "reduction/reduce.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/error.h"
#include "reduction/guarded_buffer.h"
#include "reduction/kernel_table.h"
#include "reduction/oracle.h"
#include "reduction/reduce_one.h"
#include "support/effort.h"

namespace smddp::reduction {
namespace {

template <typename Enum>
std::vector<Enum> allOf(int number) {
  std::vector<Enum> all;
  for (int i = 0; i < number; ++i) all.push_back(static_cast<Enum>(i));
  return all;
}
const std::vector<DataType> kTypes = allOf<DataType>(kNumDataTypes);
const std::vector<ReduceOp> kOps = allOf<ReduceOp>(kNumReduceOps);

// Sources and the expected results, element by element. Every shorter count is a prefix.
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
    problem.scale = {.post = true, .divisor = static_cast<double>(numSrcs) + 1};
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

// The layout of one call's buffers in memory.
struct Layout {
  size_t count;
  size_t misalignment;  // in elements; every buffer has another offset
  size_t numDsts;
  bool inPlace;  // the first destinations are sources, in reversed order
};

// Returns an empty text if all destinations are right and nothing else was changed; otherwise the first mistake.
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
    const test::Share share = test::shareUnderSanitizers();
    uint64_t number = 0;
    for (size_t numSrcs : {1, 2, 3, 4, 5, 9}) {
      const uint64_t seed = 1000 * numSrcs + counts.back();
      const Problem problem = makeProblem(type, op, numSrcs, counts.back(), seed);
      for (size_t count : counts)
        for (size_t misalignment : misalignments)
          for (size_t numDsts : {1, 2, 3, 4})
            for (bool inPlace : {false, true})
              for (SimdLevel level : availableLevels()) {
                if (!share.has(number++)) continue;
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
  checkAll({0, 1, 3, 7, 16, 17, 63, 64, 65, 1000}, {0, 1, 2, 3});
}

TEST_P(ReduceTest, MatchesTheOracleOnLongVectors) { checkAll({30011}, {1}); }

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

TEST(Reduce, RefusesWhatHasNoMeaningBeforeWriting) {
  std::vector<int32_t> a{1}, b{2}, out{-1};
  const void* srcs[] = {a.data(), b.data()};
  void* dsts[] = {out.data()};
  EXPECT_THROW(reduce(dsts, srcs, 1, DataType::int32, ReduceOp::PREMUL_SUM, {.pre = true}), Error);
  EXPECT_THROW(reduce(dsts, srcs, 1, DataType::float32, ReduceOp::BAND), Error);
  EXPECT_THROW(reduce(dsts, {}, 1, DataType::int32, ReduceOp::SUM), Error);
  EXPECT_THROW(reduce(dsts, srcs, 1, DataType::int32, ReduceOp::SUM, {.post = true}), Error);
  EXPECT_THROW(reduce(dsts, srcs, 1, DataType::int32, ReduceOp::AVG, {.divisor = 0}), Error);
  EXPECT_EQ(out[0], -1);
}

// The operations of each family of types, derived from the type's name.
std::set<ReduceOp> meantFor(const std::string& type) {
  if (type.starts_with("complex")) return {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PREMUL_SUM};
  std::set<ReduceOp> meant{ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX};
  if (type != "bool") meant.insert(ReduceOp::AVG);
  if (type.find("float") != std::string::npos)
    meant.insert(ReduceOp::PREMUL_SUM);
  else
    meant.insert({ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR});
  return meant;
}

TEST(Reduce, SupportsWhatHasAMeaning) {
  for (DataType type : kTypes)
    for (ReduceOp op : kOps)
      EXPECT_EQ(supports(type, op), meantFor(toString(type)).contains(op))
          << toString(type) << " " << toString(op);
}

TEST(Level, FollowsTheSetting) {
  // A process reads the setting once. So each value gets a process of its own.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto exitWith = [](const char* wanted, SimdLevel expected) {
    setenv("SMDDP_SIMD", wanted, 1);
    std::_Exit(simdLevel() == expected ? 0 : 1);
  };
  EXPECT_EXIT(exitWith("auto", availableLevels().back()), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(exitWith("scalar", SimdLevel::Scalar), testing::ExitedWithCode(0), "");
}

TEST(Level, IsTakenByReductions) {
  std::vector<float> a{1}, b{2}, out{0};
  const void* srcs[] = {a.data(), b.data()};
  void* dsts[] = {out.data()};
  reduce(dsts, srcs, 1, DataType::float32, ReduceOp::SUM);
  EXPECT_EQ(out[0], 3);
}

TEST(Level, MissingOnesAreUsageErrors) {
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
  for (SimdLevel level : {SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512})
    EXPECT_EQ(textOf(toString(level)).empty(), kernelsOf(level) != nullptr);
}

}  // namespace
}  // namespace smddp::reduction
