// The text that the kernels are compiled from, run on the CPU: the numbers of reduction::reduce(), bit by bit.
#include "cuda/kernels/arithmetic.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

#include "cuda/kernels/dispatch.h"
#include "reduction/oracle.h"
#include "reduction/reduce.h"

namespace smddp::cuda {
namespace {

namespace oracle = reduction::oracle;

// What reduceKernel() does, one thread after the other.
struct OnTheCpu {
  template <typename Format, ReduceOp kOp>
  void run(const Job& job) const {
    constexpr int kCount = kPerAccess<Format>;
    const uint64_t packs = isAligned(job) ? job.count / kCount : 0;
    for (uint64_t i = 0; i < packs; ++i) reducePack<Format, kOp, kCount>(job, i);
    for (uint64_t i = packs * kCount; i < job.count; ++i) reducePack<Format, kOp, 1>(job, i);
  }
};

bool runOnTheCpu(const Job& given) {
  const Job job = normalised(given);
  return isFloat(job.type) ? visitFloats(OnTheCpu{}, job) : visitIntegers(OnTheCpu{}, job);
}

// Begins `offset` bytes behind a multiple of 16.
class Buffer {
 public:
  Buffer(size_t bytes, size_t offset) : memory_(bytes / 16 + 2), offset_(offset) {}
  std::byte* data() { return reinterpret_cast<std::byte*>(memory_.data()) + offset_; }

 private:
  struct alignas(16) Line {
    std::byte bytes[16];
  };
  std::vector<Line> memory_;
  size_t offset_;
};

void fill(Buffer& buffer, size_t count, DataType type, std::mt19937_64& random) {
  oracle::withFormat(type, [&]<typename Format>() {
    using Stored = typename Format::Stored;
    for (size_t i = 0; i < count; ++i) {
      const Stored value = oracle::randomElement<Format>(random);
      std::memcpy(buffer.data() + i * sizeof(Stored), &value, sizeof(Stored));
    }
  });
}

struct Layout {
  size_t count;
  size_t offset;  // of every buffer, in elements
  int numDsts;
  bool inPlace;  // the first destination is the first source
};

class ArithmeticTest : public testing::TestWithParam<std::tuple<DataType, ReduceOp>> {
 protected:
  void check(int numSrcs, const Layout& layout, std::mt19937_64& random) {
    const auto [type, op] = GetParam();
    const size_t bytes = layout.count * sizeOf(type);
    std::vector<Buffer> buffers(static_cast<size_t>(numSrcs + layout.numDsts),
                                Buffer(bytes, layout.offset * sizeOf(type) % 16));
    Job job;
    job.type = type;
    job.op = op;
    job.count = layout.count;
    job.pre = op == ReduceOp::PREMUL_SUM;
    job.post = op == ReduceOp::AVG;
    if (job.pre) job.factor = 1.0 / 3;
    if (job.post) job.divisor = numSrcs + 1;
    std::vector<const void*> srcs;
    for (int s = 0; s < numSrcs; ++s) {
      Buffer& source = buffers[static_cast<size_t>(s)];
      fill(source, layout.count, type, random);
      srcs.push_back(job.srcs[job.numSrcs++] = source.data());
    }
    Buffer expected(bytes, 0);
    void* result = expected.data();
    reduction::reduce({&result, 1}, srcs, layout.count, type, op,
                      {job.pre, job.post, job.factor, job.divisor});
    for (int d = 0; d < layout.numDsts; ++d) {
      const int index = layout.inPlace && d == 0 ? 0 : numSrcs + d;
      job.dsts[job.numDsts++] = buffers[static_cast<size_t>(index)].data();
    }

    ASSERT_TRUE(runOnTheCpu(job));

    for (int d = 0; d < layout.numDsts; ++d) {
      EXPECT_EQ(std::memcmp(job.dsts[d], expected.data(), bytes), 0)
          << toString(type) << " " << toString(op) << " of " << numSrcs << " sources, count "
          << layout.count << ", offset " << layout.offset << ", destination " << d;
    }
  }
};

TEST_P(ArithmeticTest, GivesTheNumbersOfTheCpu) {
  const auto [type, op] = GetParam();
  std::mt19937_64 random(17 * static_cast<uint64_t>(type) + static_cast<uint64_t>(op));
  for (const int numSrcs : {1, 2, 3, 7, kMaxSharing}) {
    for (const Layout& layout :
         {Layout{1, 0, 1, true}, Layout{333, 0, 1, false}, Layout{1000, 0, 2, true},
          Layout{257, 1, 3, false}, Layout{64, 0, kMaxSharing, true}}) {
      check(numSrcs, layout, random);
    }
  }
}

using Combination = std::tuple<DataType, ReduceOp>;

std::vector<Combination> combinations(bool meaningful) {
  std::vector<Combination> all;
  for (int type = 0; type < kNumDataTypes; ++type) {
    for (int op = 0; op < kNumReduceOps; ++op) {
      const Combination one{static_cast<DataType>(type), static_cast<ReduceOp>(op)};
      if (std::apply(reduction::supports, one) == meaningful) all.push_back(one);
    }
  }
  return all;
}

std::string nameOf(const testing::TestParamInfo<Combination>& info) {
  return std::string(toString(std::get<0>(info.param))) + "_" + toString(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(All, ArithmeticTest, testing::ValuesIn(combinations(true)), nameOf);

TEST(Arithmetic, RefusesWhatTheCpuRefuses) {
  const auto meaningless = combinations(false);
  ASSERT_FALSE(meaningless.empty());
  for (const auto& [type, op] : meaningless) {
    uint64_t memory[4] = {};
    Job job;
    job.type = type;
    job.op = op;
    job.count = 1;
    job.numSrcs = 2;
    job.numDsts = 1;
    job.srcs[0] = job.srcs[1] = job.dsts[0] = memory;
    job.pre = op == ReduceOp::PREMUL_SUM;
    job.post = op == ReduceOp::AVG;
    EXPECT_FALSE(runOnTheCpu(job)) << toString(type) << " " << toString(op);
  }
}

// Every number that float16 and bfloat16 have comes back from its float32.
TEST(Formats, KeepEveryNumber) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto element = static_cast<uint16_t>(bits);
    if (const float number = Float16::load(element); number == number) {
      EXPECT_EQ(Float16::store(number), element);
    }
    if (const float number = Bfloat16::load(element); number == number) {
      EXPECT_EQ(Bfloat16::store(number), element);
    }
  }
}

}  // namespace
}  // namespace smddp::cuda
