// The kernels of the CUDA part, as they are compiled for a GPU, on a made-up one: they must write the results of
// reduction::reduce(), bit by bit, to the destinations, and nothing elsewhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "cuda/device_table.h"
#include "cuda/kernels/launch.cuh"
#include "made_up_cuda.h"
#include "reduction/oracle.h"
#include "reduction/reduce.h"

extern "C" const smddp::cuda::DeviceTable* smddp_device_table();

namespace smddp::cuda {
namespace {

namespace oracle = reduction::oracle;

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

// So many bytes of random elements.
std::vector<std::byte> randomElements(DataType type, size_t bytes, std::mt19937_64& random) {
  std::vector<std::byte> all(bytes);
  oracle::withFormat(type, [&]<typename Format>() {
    using Stored = typename Format::Stored;
    for (size_t at = 0; at + sizeof(Stored) <= bytes; at += sizeof(Stored)) {
      const Stored value = oracle::randomElement<Format>(random);
      std::memcpy(all.data() + at, &value, sizeof(Stored));
    }
  });
  return all;
}

// The device has one multiprocessor, so at most four blocks run. A vector that is longer than their threads take at
// once, of packs of 16 bytes, or of elements where it is not aligned, needs a second pass.
constexpr size_t kBlocks = 4;
constexpr size_t kPerPass = kBlocks * kThreads;

enum class Alignment { All, None, AllButOne };

class KernelsTest : public testing::TestWithParam<Combination> {
 protected:
  KernelsTest()
      : type_(std::get<0>(GetParam())),
        op_(std::get<1>(GetParam())),
        random_(17 * static_cast<uint64_t>(type_) + static_cast<uint64_t>(op_)) {
    made_up_cuda::reset();
    stream_ = made_up_cuda::newStream(0);
    elements_ = randomElements(type_, kMostBytes + 4096, random_);
    void* memory = nullptr;
    EXPECT_EQ(table_.allocate(0, 2 * kMaxSharing * (kMostBytes + 64), &memory), 0);
    memory_ = static_cast<std::byte*>(memory);
  }
  ~KernelsTest() override { made_up_cuda::reset(); }

  size_t below(size_t end) { return random_() % end; }

  // Where a buffer of so many bytes begins, the next one behind it. `used_` is what they take, gaps included.
  size_t place(size_t bytes, bool aligned) {
    const size_t step = sizeOf(type_);
    used_ = (used_ + 16 + 15) / 16 * 16;
    if (!aligned && step < 16) used_ += step * (1 + below(16 / step - 1));
    const size_t at = used_;
    used_ += bytes;
    return at;
  }

  // Runs one job and compares the whole memory with what it should hold then.
  void check(int numSrcs, int numDsts, size_t count, Alignment alignment) {
    const size_t bytes = count * sizeOf(type_);
    ASSERT_LE(bytes, kMostBytes);
    const size_t odd =
        below(static_cast<size_t>(numSrcs + numDsts));  // the one that is not aligned
    const auto isAligned = [&](int buffer) {
      return alignment == Alignment::All ||
             (alignment == Alignment::AllButOne && static_cast<size_t>(buffer) != odd);
    };
    used_ = 0;
    std::vector<size_t> srcs, dsts;
    for (int s = 0; s < numSrcs; ++s) srcs.push_back(place(bytes, isAligned(s)));
    for (int d = 0; d < numDsts; ++d) dsts.push_back(place(bytes, isAligned(numSrcs + d)));
    // In place, an element that is written twice is wrong.
    const bool inPlace = below(2) == 0;
    if (inPlace) dsts[0] = srcs[below(srcs.size())];
    used_ += 16;

    for (size_t at = 0; at < used_; at += kMostBytes) {
      std::memcpy(memory_ + at, elements_.data(), std::min(kMostBytes, used_ - at));
    }
    for (const size_t at : srcs) {
      const size_t from = below(4096 / sizeOf(type_)) * sizeOf(type_);
      if (bytes > 0) std::memcpy(memory_ + at, elements_.data() + from, bytes);
    }
    std::vector<std::byte> expected(memory_, memory_ + used_);
    Job job;
    job.type = type_;
    job.op = op_;
    job.count = count;
    job.pre = op_ == ReduceOp::PREMUL_SUM;
    job.post = op_ == ReduceOp::AVG;
    if (job.pre) job.factor = 1.0 / 3;
    if (job.post) job.divisor = numSrcs + 1;
    std::vector<const void*> from;
    std::vector<void*> into;
    for (const size_t at : srcs) {
      job.srcs[job.numSrcs++] = memory_ + at;
      from.push_back(expected.data() + at);
    }
    for (const size_t at : dsts) {
      job.dsts[job.numDsts++] = memory_ + at;
      into.push_back(expected.data() + at);
    }
    reduction::reduce(into, from, count, type_, op_,
                      {job.pre, job.post, job.factor, static_cast<double>(job.divisor)});

    ASSERT_EQ(table_.run(0, &job, stream_), 0);
    ASSERT_LE(made_up_cuda::pending(stream_), 1u);
    job = Job{};  // the caller's again
    made_up_cuda::finish(stream_);

    if (std::memcmp(memory_, expected.data(), used_) != 0) {
      const auto wrong = std::mismatch(expected.begin(), expected.end(), memory_).first;
      ADD_FAILURE() << toString(type_) << " " << toString(op_) << " of " << numSrcs
                    << " sources into " << numDsts << ", count " << count << ", alignment "
                    << static_cast<int>(alignment) << (inPlace ? ", in place" : "") << ": byte "
                    << wrong - expected.begin() << " of " << used_ << " is wrong; " << bytes
                    << " at " << testing::PrintToString(srcs) << " into "
                    << testing::PrintToString(dsts);
    }
    EXPECT_EQ(made_up_cuda::lastError(), cudaSuccess);
    for (const made_up_cuda::Launch& launch : made_up_cuda::takeLaunches()) {
      EXPECT_EQ(launch.block.x, static_cast<unsigned>(kThreads));  // what the kernel counts with
      EXPECT_EQ(launch.block.y * launch.block.z * launch.grid.y * launch.grid.z, 1u);
      EXPECT_LE(launch.grid.x, kBlocks);
    }
  }

  static constexpr size_t kMostBytes = 5 * 16 * kPerPass / 2;
  const DeviceTable& table_ = *smddp_device_table();
  const DataType type_;
  const ReduceOp op_;
  std::mt19937_64 random_;
  cudaStream_t stream_;
  std::vector<std::byte> elements_;
  std::byte* memory_ = nullptr;
  size_t used_ = 0;
};

TEST_P(KernelsTest, GiveTheNumbersOfTheCpu) {
  for (int numSrcs = 1; numSrcs <= kMaxSharing; ++numSrcs) {
    for (const auto alignment : {Alignment::All, Alignment::None, Alignment::AllButOne}) {
      check(numSrcs, 1 + static_cast<int>(below(kMaxSharing)), 1 + below(300), alignment);
    }
  }
  check(kMaxSharing, kMaxSharing, 100, Alignment::All);
}

// Counts around whole packs, whole blocks and whole passes of the grid.
TEST_P(KernelsTest, DealWithEveryCount) {
  const size_t bytes = sizeOf(type_);
  const size_t perPack = bytes < 16 ? 16 / bytes : 1;
  const bool isComplex = type_ == DataType::complex64 || type_ == DataType::complex128;
  for (const auto alignment : {Alignment::All, Alignment::None}) {
    // The elements that a thread takes at once; that may be half a complex number.
    const size_t perThread = alignment == Alignment::All && bytes < 16 ? perPack : 1;
    std::vector<size_t> counts = {0, 1, perPack - 1, perPack, perPack + 1};
    for (size_t whole : {kThreads * perThread, kPerPass * perThread, 2 * kPerPass * perThread}) {
      if (isComplex && perThread == 1 && bytes < 16) whole /= 2;
      counts.insert(counts.end(), {whole - 1, whole, whole + 1});
    }
    counts.push_back(2 * kPerPass * perThread + kThreads + below(perPack + 2));
    for (const size_t count : counts) {
      check(1 + static_cast<int>(below(3)), 1 + static_cast<int>(below(2)), count, alignment);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, KernelsTest, testing::ValuesIn(combinations(true)), nameOf);

TEST(Kernels, RefuseWhatTheCpuRefuses) {
  made_up_cuda::reset();
  const DeviceTable& table = *smddp_device_table();
  cudaStream_t const stream = made_up_cuda::newStream(0);
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
    EXPECT_EQ(table.run(0, &job, stream), cudaErrorInvalidValue)
        << toString(type) << " " << toString(op);
    EXPECT_EQ(made_up_cuda::lastError(), cudaSuccess);
  }
  EXPECT_EQ(made_up_cuda::pending(stream), 0u);
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
