// Every collective through real engines, with ranks as threads, against an exact oracle: inputs are small whole
// numbers, so that all intermediate results are exact in any order of summation.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <random>

#include "common/config.h"
#include "engine/calls.h"
#include "reduction/oracle.h"
#include "support/effort.h"
#include "support/ranks.h"

namespace smddp::test {
namespace {

namespace oracle = reduction::oracle;
using Contents = std::vector<std::byte>;

// Inputs and results repeat after this many elements, so the oracle computes one period only. It is a prime, so that
// no cut coincides with it.
constexpr size_t kPeriod = 61;
constexpr double kFactor = 0.5;

bool isUnsigned(DataType type) {
  return type == DataType::uint8 || type == DataType::uint16 || type == DataType::uint32 ||
         type == DataType::uint64;
}

// An element of a rank's input. Products and sums over six ranks, and halves of them, are exact in bfloat16.
int64_t wholeNumber(Rank rank, size_t element, DataType type, ReduceOp op) {
  const auto mixed = static_cast<int64_t>((element * 7 + static_cast<size_t>(rank) * 5) % 9);
  if (type == DataType::boolean) return mixed % 2;
  if (isUnsigned(type)) return op == ReduceOp::PRODUCT ? 1 + mixed % 2 : mixed;
  if (op == ReduceOp::PRODUCT) return mixed % 2 == 0 ? 2 : -1;
  return (mixed - 4) * 2;
}

Contents repeat(const Contents& period, size_t bytes) {
  Contents whole = period;
  whole.resize(bytes);
  // Double the filled part each time: whole periods, except the last part.
  for (size_t filled = period.size(); filled < bytes; filled *= 2) {
    std::memcpy(whole.data() + filled, whole.data(), std::min(filled, bytes - filled));
  }
  return whole;
}

bool same(Bytes got, const Contents& expected) {
  return got.size() == expected.size() &&
         (got.empty() || std::memcmp(got.data(), expected.data(), got.size()) == 0);
}

template <typename Format>
void append(Contents& to, typename Format::Stored value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  to.insert(to.end(), bytes, bytes + sizeof value);
}

template <typename Format>
typename Format::Stored encoded(int64_t value) {
  using Number = typename Format::Number;
  if constexpr (oracle::kIsComplex<Number>) {
    using Part = typename Number::value_type;
    return Format::encode({static_cast<Part>(value), static_cast<Part>(-value - 2)});
  } else {
    return Format::encode(static_cast<Number>(value));
  }
}

Contents inputOf(Rank rank, size_t count, DataType type, ReduceOp op) {
  return oracle::withFormat(type, [&]<typename Format>() {
    Contents period;
    for (size_t i = 0; i < kPeriod; ++i) {
      append<Format>(period, encoded<Format>(wholeNumber(rank, i, type, op)));
    }
    return repeat(period, count * sizeOf(type));
  });
}

// The reduction of all ranks' inputs.
Contents reduced(int size, size_t count, DataType type, ReduceOp op) {
  return oracle::withFormat(type, [&]<typename Format>() {
    reduction::Scale scale;
    scale.pre = op == ReduceOp::PREMUL_SUM;
    scale.post = op == ReduceOp::AVG;
    scale.factor = kFactor;
    scale.divisor = size;
    Contents period;
    for (size_t i = 0; i < kPeriod; ++i) {
      std::vector<typename Format::Stored> inputs;
      for (Rank r = 0; r < size; ++r) {
        inputs.push_back(encoded<Format>(wholeNumber(r, i, type, op)));
      }
      append<Format>(period, oracle::element<Format>(inputs, op, scale));
    }
    return repeat(period, count * sizeOf(type));
  });
}

// The memory of the ranks' buffers.
enum class Memory { Ordinary, Shared, Mixed };

struct Buffers {
  const RankContext& rank;
  Memory memory = Memory::Ordinary;

  std::unique_ptr<Block> make(size_t bytes, size_t misalignment = 0) const {
    const bool shared = memory == Memory::Shared || (memory == Memory::Mixed && rank.rank > 0);
    return std::make_unique<Block>(bytes, misalignment,
                                   shared ? rank.engine.process().memory().tensors.get() : nullptr);
  }
  std::unique_ptr<Block> make(const Contents& contents, size_t misalignment = 0) const {
    auto block = make(contents.size(), misalignment);
    std::copy(contents.begin(), contents.end(), block->bytes().begin());
    return block;
  }
};

void expectContents(Block& block, const Contents& expected, const std::string& what) {
  const Bytes got = block.bytes();
  if (!same(got, expected)) {
    const auto at = std::mismatch(got.begin(), got.end(), expected.begin(), expected.end()).first;
    ADD_FAILURE() << what << ": byte " << at - got.begin() << " of " << got.size() << " differs";
  }
  EXPECT_TRUE(block.guardsIntact()) << what << ": wrote beside its buffer";
}

class CollectiveTest : public testing::TestWithParam<Job> {};
// Calls whose algorithm a setting changes.
class AllReduceTest : public CollectiveTest {};
class ReduceTest : public CollectiveTest {};

using Layouts = std::vector<std::vector<int>>;
const Layouts kOneNode{{1}, {2}, {3}};
const Layouts kSeveralNodes{{2, 2}, {1, 1, 1}, {1, 3}, {2, 1, 3}, {1, 2, 1, 1, 1}};
const Layouts kAllLayouts = [] {
  Layouts all = kOneNode;
  all.insert(all.end(), kSeveralNodes.begin(), kSeveralNodes.end());
  return all;
}();

std::string nameOfCase(const testing::TestParamInfo<Job>& info) { return nameOf(info.param); }

#define INSTANTIATE(name, suite, ...) \
  INSTANTIATE_TEST_SUITE_P(name, suite, testing::ValuesIn(jobsOf(__VA_ARGS__)), nameOfCase)

INSTANTIATE(OneNode, CollectiveTest, kOneNode);
INSTANTIATE(OneNode, AllReduceTest, kOneNode);
INSTANTIATE(OneNode, ReduceTest, kOneNode);
INSTANTIATE(SeveralNodes, CollectiveTest, kSeveralNodes);
INSTANTIATE(SeveralNodes, AllReduceTest, kSeveralNodes);
INSTANTIATE(SeveralNodes, ReduceTest, kSeveralNodes);

// Algorithms that the table does not choose for small groups.
void useRing(Settings& settings) { settings.algorithm = "allreduce=ring"; }
void useHalvingDoubling(Settings& settings) { settings.algorithm = "allreduce=halving_doubling"; }
void useRecursiveDoubling(Settings& settings) {
  settings.algorithm = "allreduce=recursive_doubling";
}
INSTANTIATE(Ring, AllReduceTest, kSeveralNodes, useRing);
INSTANTIATE(HalvingDoubling, AllReduceTest, kSeveralNodes, useHalvingDoubling);
INSTANTIATE(RecursiveDoubling, AllReduceTest, kSeveralNodes, useRecursiveDoubling);

// Otherwise short vectors on one node never take the plans for long ones.
void useNoOneShot(Settings& settings) { settings.oneShotBytes = 0; }
INSTANTIATE(NoOneShot, AllReduceTest, kOneNode, useNoOneShot);
INSTANTIATE(NoOneShot, ReduceTest, kOneNode, useNoOneShot);

// As if mates had separate caches, which a test machine may not have.
void useStreaming(Settings& settings) { settings.stagingStores = "streaming"; }
INSTANTIATE(Streaming, CollectiveTest, kOneNode, useStreaming);
INSTANTIATE(Streaming, AllReduceTest, kOneNode, useStreaming);
INSTANTIATE(Streaming, ReduceTest, kOneNode, useStreaming);

void useSmallChunks(Settings& settings) {
  settings.chunkBytes = 4096;
  settings.fabricChunkBytes = 65536;
}
INSTANTIATE(SmallChunks, CollectiveTest, kAllLayouts, useSmallChunks);
INSTANTIATE(SmallChunks, AllReduceTest, kAllLayouts, useSmallChunks);
INSTANTIATE(SmallChunks, ReduceTest, kAllLayouts, useSmallChunks);

void checkAllReduce(const Buffers& buffers, size_t count, DataType type, ReduceOp op,
                    size_t misalignment) {
  const RankContext& rank = buffers.rank;
  const auto block = buffers.make(inputOf(rank.rank, count, type, op), misalignment);
  rank.run(allReduce(block->bytes(), type, op, kFactor));
  expectContents(*block, reduced(rank.size, count, type, op),
                 fmt::format("rank {}: allreduce of {} {} with {}", rank.rank, count,
                             toString(type), toString(op)));
}

// These few reductions are tested with many counts; the others with one.
constexpr std::pair<DataType, ReduceOp> kSomeReductions[] = {
    {DataType::float32, ReduceOp::SUM},
    {DataType::bfloat16, ReduceOp::AVG},
    {DataType::float16, ReduceOp::PREMUL_SUM},
    {DataType::int64, ReduceOp::MIN}};

template <typename Visit>
void forEachReduction(Visit visit) {
  if (!kAllTypes) {
    for (const auto& [type, op] : kSomeReductions) visit(type, op);
    return;
  }
  for (int t = 0; t < kNumDataTypes; ++t) {
    for (int o = 0; o < kNumReduceOps; ++o) {
      const auto type = static_cast<DataType>(t);
      const auto op = static_cast<ReduceOp>(o);
      if (reduction::supports(type, op)) visit(type, op);
    }
  }
}

TEST_P(AllReduceTest, AllReduceIsExact) {
  runRanks(GetParam(), [](RankContext& rank) {
    const auto n = static_cast<size_t>(rank.size);
    for (const Memory memory : {Memory::Ordinary, Memory::Shared}) {
      forEachReduction([&](DataType type, ReduceOp op) {
        size_t misalignment = 0;
        for (const size_t count : {size_t{0}, n - 1, n + 1, size_t{1237}}) {
          checkAllReduce({rank, memory}, count, type, op, misalignment++ % 2 * 3);
        }
      });
    }
  });
}

TEST_P(AllReduceTest, LongAllReduceIsExact) {
  runRanks(GetParam(), [](RankContext& rank) {
    const Buffers buffers{rank};
    const Settings& settings = rank.engine.settings;
    const auto aboveOneShot = static_cast<size_t>(settings.oneShotBytes) + 8;
    const auto chunks =
        static_cast<size_t>(2 * std::max(settings.chunkBytes, settings.fabricChunkBytes));
    for (const auto& [type, op] : {std::pair{DataType::float32, ReduceOp::SUM},
                                   {DataType::bfloat16, ReduceOp::AVG},
                                   {DataType::complex128, ReduceOp::PREMUL_SUM},
                                   {DataType::uint8, ReduceOp::MAX},
                                   {DataType::boolean, ReduceOp::BXOR}}) {
      checkAllReduce(buffers, aboveOneShot / sizeOf(type), type, op, 1);
      checkAllReduce(buffers, chunks / sizeOf(type) + 77, type, op, 0);
    }
  });
}

// As with DDP, gradients lie in shared memory. If one rank has a private buffer, all ranks stage.
TEST_P(AllReduceTest, AllReduceInSharedMemoryIsExact) {
  runRanks(GetParam(), [](RankContext& rank) {
    for (const Memory memory : {Memory::Shared, Memory::Mixed}) {
      // 5003: private buffers are copied before the arrival, shared ones are not.
      for (const size_t count :
           {size_t{0}, size_t{1}, size_t{1237}, size_t{5003}, longCount(300'007)}) {
        checkAllReduce({rank, memory}, count, DataType::float32, ReduceOp::SUM, 4);
        checkAllReduce({rank, memory}, count, DataType::bfloat16, ReduceOp::AVG, 2);
      }
    }
  });
}

// Numbers whose sums depend on the order of summation.
template <typename Format>
Contents randomNumbers(uint64_t seed, size_t count) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Contents some;
  for (size_t i = 0; i < std::min(count, size_t{4999}); ++i) {
    append<Format>(some, Format::encode(static_cast<typename Format::Number>(normal(random))));
  }
  return repeat(some, count * sizeof(typename Format::Stored));
}

// Each rank's output after one run of all reductions: [case][rank].
using Bits = std::map<std::string, std::vector<Contents>>;

Bits bitsOfOneRun(const Job& job) {
  std::mutex mutex;
  Bits bits;
  runRanks(job, [&](RankContext& rank) {
    const auto note = [&](const std::string& name, Block& block) {
      const std::lock_guard lock(mutex);
      auto& all = bits[name];
      all.resize(static_cast<size_t>(rank.size));
      all[static_cast<size_t>(rank.rank)] = block.copy();
    };
    const auto runAll = [&](Memory memory, DataType type, size_t count, auto numbers) {
      const auto ranks = static_cast<size_t>(rank.size);
      const Buffers buffers{rank, memory};
      const Contents all = numbers(count * 31 + static_cast<size_t>(rank.rank), ranks * count);
      const Contents one(all.begin(),
                         all.begin() + static_cast<std::ptrdiff_t>(all.size() / ranks));
      const auto name =
          fmt::format("memory {}, {} {}", static_cast<int>(memory), count, toString(type));
      const auto block = buffers.make(one);
      rank.run(allReduce(block->bytes(), type, ReduceOp::AVG));
      note("allreduce, " + name, *block);
      const auto input = buffers.make(all), output = buffers.make(one.size());
      rank.run(reduceScatter({input->bytes()}, output->bytes(), type, ReduceOp::AVG));
      note("reduce_scatter, " + name, *output);
      const Rank root = rank.size - 1;
      const auto data = buffers.make(one);
      rank.run(reduce(data->bytes(), root, rank.rank == root, type, ReduceOp::AVG));
      note("reduce, " + name, *data);
    };
    for (const Memory memory : {Memory::Ordinary, Memory::Shared, Memory::Mixed}) {
      for (const size_t count : {size_t{5}, size_t{1237}, longCount(100'007)}) {
        for (const DataType type :
             {DataType::float32, DataType::bfloat16, DataType::float16, DataType::complex64}) {
          oracle::withFormat(
              type, [&]<typename Format>() { runAll(memory, type, count, randomNumbers<Format>); });
        }
      }
    }
  });
  return bits;
}

TEST_P(AllReduceTest, AllRanksAndRunsGiveTheSameBits) {
  const Bits first = bitsOfOneRun(GetParam()), second = bitsOfOneRun(GetParam());
  for (const auto& [name, all] : first) {
    EXPECT_TRUE(all == second.at(name)) << name << ": another result in the second run";
    if (!name.starts_with("allreduce")) continue;
    for (const Contents& one : all) EXPECT_TRUE(one == all[0]) << name;
  }
}

TEST_P(CollectiveTest, BroadcastReachesEveryone) {
  runRanks(GetParam(), [](RankContext& rank) {
    for (const Memory memory : {Memory::Ordinary, Memory::Shared, Memory::Mixed}) {
      for (const size_t bytes : {size_t{0}, size_t{1}, size_t{4099}, longCount(1'500'001)}) {
        for (Rank root = 0; root < rank.size; ++root) {
          const Contents sent = inputOf(root, bytes, DataType::uint8, ReduceOp::SUM);
          const Buffers buffers{rank, memory};
          const auto block = rank.rank == root ? buffers.make(sent, 1) : buffers.make(bytes, 1);
          rank.run(broadcast(block->bytes(), root));
          expectContents(*block, sent,
                         fmt::format("rank {}: broadcast of {} from {}", rank.rank, bytes, root));
        }
      }
    }
  });
}

// The blocks of all ranks, as one buffer or as a list of buffers.
struct Blocks {
  Blocks(const Buffers& buffers, size_t bytes, bool list)
      : bytes(bytes), numBlocks(static_cast<size_t>(buffers.rank.size)) {
    if (!list) memory.push_back(buffers.make(bytes * numBlocks, 1));
    for (size_t i = 0; list && i < numBlocks; ++i) memory.push_back(buffers.make(bytes, i));
  }
  engine::calls::Pieces pieces() {
    engine::calls::Pieces all;
    for (const auto& block : memory) all.push_back(block->bytes());
    return all;
  }
  // Block r.
  Bytes operator[](Rank r) {
    const auto index = static_cast<size_t>(r);
    return memory.size() > 1 ? memory[index]->bytes()
                             : memory[0]->bytes().subspan(index * bytes, bytes);
  }
  bool guardsIntact() const {
    return std::all_of(memory.begin(), memory.end(), [](auto& b) { return b->guardsIntact(); });
  }

  size_t bytes, numBlocks;
  std::vector<std::unique_ptr<Block>> memory;
};

TEST_P(CollectiveTest, AllGatherCollectsEveryBlock) {
  runRanks(GetParam(), [](RankContext& rank) {
    for (const Memory memory : {Memory::Ordinary, Memory::Shared, Memory::Mixed}) {
      for (const bool list : {false, true}) {
        for (const size_t bytes : {size_t{0}, size_t{3}, size_t{4099}, longCount(700'001)}) {
          const Buffers buffers{rank, memory};
          const auto mine = buffers.make(inputOf(rank.rank, bytes, DataType::uint8, ReduceOp::SUM));
          Blocks all(buffers, bytes, list);
          rank.run(allGather(mine->bytes(), all.pieces()));
          for (Rank r = 0; r < rank.size; ++r) {
            const Contents sent = inputOf(r, bytes, DataType::uint8, ReduceOp::SUM);
            EXPECT_TRUE(same(all[r], sent))
                << "rank " << rank.rank << ": block " << r << " of " << bytes << " bytes";
          }
          EXPECT_TRUE(all.guardsIntact() && mine->guardsIntact());
        }
      }
    }
  });
}

// The input of rank r to block b is that of rank r to an allreduce, shifted by b elements.
void checkReduceScatter(const Buffers& buffers, size_t count, DataType type, ReduceOp op,
                        bool list) {
  const RankContext& rank = buffers.rank;
  const auto tailOf = [&](Contents contents, Rank shift) {
    const auto bytes = static_cast<size_t>(shift) * sizeOf(type);
    contents.erase(contents.begin(), contents.begin() + static_cast<std::ptrdiff_t>(bytes));
    return contents;
  };
  const size_t bytes = count * sizeOf(type);
  Blocks all(buffers, bytes, list);
  for (Rank b = 0; b < rank.size; ++b) {
    const Contents input = inputOf(rank.rank, count + static_cast<size_t>(b), type, op);
    std::ranges::copy(tailOf(input, b), all[b].begin());
  }
  const auto mine = buffers.make(bytes);
  rank.run(reduceScatter(all.pieces(), mine->bytes(), type, op, kFactor));
  const auto shift = static_cast<size_t>(rank.rank);
  expectContents(*mine, tailOf(reduced(rank.size, count + shift, type, op), rank.rank),
                 fmt::format("rank {}: reduce_scatter of {} {} with {}", rank.rank, count,
                             toString(type), toString(op)));
}

TEST_P(ReduceTest, ReduceScatterIsExact) {
  runRanks(GetParam(), [](RankContext& rank) {
    for (const Memory memory : {Memory::Ordinary, Memory::Shared, Memory::Mixed}) {
      forEachReduction([&](DataType type, ReduceOp op) {
        checkReduceScatter({rank, memory}, 237, type, op, false);
      });
      for (const bool list : {false, true}) {
        for (const auto& [type, op] : kSomeReductions) {
          for (const size_t count : {size_t{0}, size_t{1}, size_t{1237}, longCount(150'001)}) {
            checkReduceScatter({rank, memory}, count, type, op, list);
          }
        }
      }
    }
  });
}

// Only the root's buffer changes.
void checkReduce(const Buffers& buffers, size_t count, DataType type, ReduceOp op, Rank root) {
  const RankContext& rank = buffers.rank;
  const Contents input = inputOf(rank.rank, count, type, op);
  const auto block = buffers.make(input, 8);
  rank.run(reduce(block->bytes(), root, rank.rank == root, type, op, kFactor));
  expectContents(*block, rank.rank == root ? reduced(rank.size, count, type, op) : input,
                 fmt::format("rank {}: reduce of {} {} with {} to {}", rank.rank, count,
                             toString(type), toString(op), root));
}

TEST_P(ReduceTest, ReduceIsExact) {
  runRanks(GetParam(), [](RankContext& rank) {
    for (const Memory memory : {Memory::Ordinary, Memory::Shared, Memory::Mixed}) {
      Rank root = 0;
      forEachReduction([&](DataType type, ReduceOp op) {
        checkReduce({rank, memory}, 1237, type, op, root++ % rank.size);
      });
      for (const auto& [type, op] : kSomeReductions) {
        for (const size_t count : {size_t{0}, size_t{1}, longCount(150'001)}) {
          checkReduce({rank, memory}, count, type, op, root++ % rank.size);
        }
      }
    }
  });
}

// Their sum is beyond the largest float16.
TEST_P(CollectiveTest, AveragesOfFloat16DoNotOverflow) {
  runRanks(GetParam(), [](RankContext& rank) {
    const auto fortyThousands = [](size_t count) {
      return oracle::withFormat(DataType::float16, [&]<typename Format>() {
        Contents one;
        append<Format>(one, encoded<Format>(40'000));
        return repeat(one, count * sizeof(typename Format::Stored));
      });
    };
    for (const Memory memory : {Memory::Ordinary, Memory::Shared}) {
      for (const size_t count : {size_t{3}, size_t{1237}, longCount(150'001)}) {
        const Buffers buffers{rank, memory};
        const auto what = fmt::format("rank {}: {} elements", rank.rank, count);
        const Contents expected = fortyThousands(count);
        const auto block = buffers.make(expected);
        rank.run(allReduce(block->bytes(), DataType::float16, ReduceOp::AVG));
        expectContents(*block, expected, "allreduce, " + what);
        const auto input = buffers.make(fortyThousands(count * static_cast<size_t>(rank.size)));
        const auto output = buffers.make(expected.size());
        rank.run(
            reduceScatter({input->bytes()}, output->bytes(), DataType::float16, ReduceOp::AVG));
        expectContents(*output, expected, "reduce_scatter, " + what);
        rank.run(reduce(block->bytes(), 0, rank.rank == 0, DataType::float16, ReduceOp::AVG));
        expectContents(*block, expected, "reduce, " + what);
      }
    }
  });
}

// The block from one rank to another: that of the first rank, shifted by the number of the other.
Contents blockOf(Rank from, Rank to, size_t bytes) {
  const auto shift = static_cast<size_t>(to);
  Contents block = inputOf(from, bytes + shift, DataType::uint8, ReduceOp::SUM);
  block.erase(block.begin(), block.begin() + static_cast<std::ptrdiff_t>(shift));
  return block;
}

constexpr size_t kBlockBytes[] = {0, 3, 4099, longCount(300'001)};

TEST_P(CollectiveTest, GatherCollectsEveryBlockAtTheRoot) {
  runRanks(GetParam(), [](RankContext& rank) {
    for (const Memory memory : {Memory::Ordinary, Memory::Shared, Memory::Mixed}) {
      for (const bool list : {false, true}) {
        for (const size_t bytes : kBlockBytes) {
          for (Rank root = 0; root < rank.size; root += 2) {
            const Buffers buffers{rank, memory};
            const Contents sent = blockOf(rank.rank, root, bytes);
            const auto mine = buffers.make(sent);
            Blocks all(buffers, rank.rank == root ? bytes : 0, list);
            rank.run(gather(mine->bytes(),
                            rank.rank == root ? all.pieces() : engine::calls::Pieces{}, root));
            for (Rank r = 0; rank.rank == root && r < rank.size; ++r) {
              EXPECT_TRUE(same(all[r], blockOf(r, root, bytes)))
                  << "root " << root << ": block " << r << " of " << bytes << " bytes";
            }
            EXPECT_TRUE(all.guardsIntact());
            expectContents(*mine, sent, "the input of a gather");
          }
        }
      }
    }
  });
}

TEST_P(CollectiveTest, ScatterHandsEveryBlockOut) {
  runRanks(GetParam(), [](RankContext& rank) {
    for (const Memory memory : {Memory::Ordinary, Memory::Shared, Memory::Mixed}) {
      for (const bool list : {false, true}) {
        for (const size_t bytes : kBlockBytes) {
          for (Rank root = 0; root < rank.size; root += 2) {
            const Buffers buffers{rank, memory};
            Blocks all(buffers, rank.rank == root ? bytes : 0, list);
            for (Rank r = 0; rank.rank == root && r < rank.size; ++r) {
              std::ranges::copy(blockOf(root, r, bytes), all[r].begin());
            }
            const auto mine = buffers.make(bytes);
            rank.run(scatter(rank.rank == root ? all.pieces() : engine::calls::Pieces{},
                             mine->bytes(), root));
            expectContents(*mine, blockOf(root, rank.rank, bytes),
                           fmt::format("rank {}: scatter of {} from {}", rank.rank, bytes, root));
            EXPECT_TRUE(all.guardsIntact());
          }
        }
      }
    }
  });
}

TEST_P(CollectiveTest, AllToAllExchangesEveryBlock) {
  runRanks(GetParam(), [](RankContext& rank) {
    for (const Memory memory : {Memory::Ordinary, Memory::Shared, Memory::Mixed}) {
      for (const bool list : {false, true}) {
        for (const size_t bytes : kBlockBytes) {
          const Buffers buffers{rank, memory};
          Blocks input(buffers, bytes, list), output(buffers, bytes, list);
          for (Rank r = 0; r < rank.size; ++r) {
            std::ranges::copy(blockOf(rank.rank, r, bytes), input[r].begin());
          }
          rank.run(allToAll(input.pieces(), output.pieces(), bytes));
          for (Rank r = 0; r < rank.size; ++r) {
            EXPECT_TRUE(same(output[r], blockOf(r, rank.rank, bytes)))
                << "rank " << rank.rank << ": block from " << r << " of " << bytes << " bytes";
            EXPECT_TRUE(same(input[r], blockOf(rank.rank, r, bytes)));
          }
          EXPECT_TRUE(input.guardsIntact() && output.guardsIntact());
        }
      }
    }
  });
}

TEST_P(CollectiveTest, NobodyLeavesABarrierBeforeAllEntered) {
  std::atomic<int> entered{0};
  runRanks(GetParam(), [&](RankContext& rank) {
    std::mt19937 random(static_cast<unsigned>(rank.rank));
    for (int round = 1; round <= 50; ++round) {
      for (unsigned i = random() % 20; i > 0; --i) std::this_thread::yield();
      ++entered;
      rank.run(barrier());
      EXPECT_GE(entered.load(), rank.size * round);
    }
  });
}

}  // namespace
}  // namespace smddp::test
