// Calls among ranks that share a GPU: values, races between exchanges, and refusals.
#include "cuda/shared_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <tuple>

#include "common/error.h"
#include "cuda/fake_gpu.h"

namespace smddp::cuda {
namespace {

using testing::HasSubstr;

// Descriptors of all ranks, exchange after exchange.
struct Meetings {
  std::vector<std::vector<std::optional<Descriptor>>> all;
};

class Rank final : public Stream, public Exchange {
 public:
  Rank(int me, int size, int64_t workspaceBytes, Meetings& meetings)
      : gpu(kFakeTable, me, me, size, workspaceBytes), me_(me), size_(size), meetings_(meetings) {}

  void begin(const Call& call, const Buffers& buffers) {
    call_ = std::make_unique<SharedCall>(gpu, call, buffers, *this, *this);
  }
  bool advance() { return call_->advance() && done(); }
  SharedCall& call() { return *call_; }

  SharedGpu gpu;

 private:
  void* handle() const override { return nullptr; }
  void mark() override {}
  // The kernels run at the second look.
  bool reached() const override {
    if (++looks_ % 2 == 1) return false;
    FakeGpu::get().runQueue(me_);
    return true;
  }
  void begin(const Descriptor& mine, bool) override {
    if (meetings_.all.size() <= met_) meetings_.all.emplace_back(static_cast<size_t>(size_));
    meetings_.all[met_++][static_cast<size_t>(me_)] = mine;
  }
  bool done() override {
    const auto& said = meetings_.all[met_ - 1];
    if (!std::all_of(said.begin(), said.end(), [](const auto& one) { return one.has_value(); })) {
      return false;
    }
    all_.clear();
    for (const auto& one : said) all_.push_back(*one);
    FakeGpu::get().turns[me_] = static_cast<int>(met_);
    return true;
  }
  std::span<const Descriptor> all() const override { return all_; }

  const int me_, size_;
  Meetings& meetings_;
  mutable int looks_ = 0;
  size_t met_ = 0;
  std::vector<Descriptor> all_;
  std::unique_ptr<SharedCall> call_;
};

struct DeviceMemory {
  explicit DeviceMemory(size_t bytes) : bytes(bytes) { kFakeTable.allocate(0, bytes + 1, &data); }
  ~DeviceMemory() { kFakeTable.free(0, data); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  std::byte* begin() const { return static_cast<std::byte*>(data); }
  std::vector<std::byte> copy() const { return {begin(), begin() + bytes}; }
  void* data = nullptr;
  size_t bytes;
};

class SharedCallTest : public testing::Test {
 protected:
  void SetUp() override { FakeGpu::get() = {}; }
  void TearDown() override {
    ranks_.clear();
    for (const auto& [data, allocation] : FakeGpu::get().allocations) std::free(data);
  }

  // Ranks with their workspaces.
  void meet(int size, int64_t workspaceBytes = 4096) {
    std::vector<Introduction> said;
    for (int me = 0; me < size; ++me) {
      ranks_.push_back(std::make_unique<Rank>(me, size, workspaceBytes, meetings_));
      said.push_back(ranks_.back()->gpu.introduce());
    }
    ASSERT_EQ(refusalOf(said), "");
    for (auto& rank : ranks_) ASSERT_EQ(rank->gpu.connect(said), "");
  }

  // Advances all ranks, in random order, until the call has ended on all.
  void run(std::mt19937_64& random) {
    std::vector<Rank*> left;
    for (auto& rank : ranks_) left.push_back(rank.get());
    for (int steps = 0; !left.empty(); ++steps) {
      ASSERT_LT(steps, 100'000) << "the call does not end";
      const size_t next = random() % left.size();
      if (left[next]->advance()) left.erase(left.begin() + static_cast<ptrdiff_t>(next));
    }
  }

  Meetings meetings_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// --- values -------------------------------------------------------------------------------------------------------

using Values = std::vector<std::vector<std::byte>>;

// How many bytes each rank sends to each other rank.
using Matrix = std::vector<std::vector<uint64_t>>;

// The expected outputs of the ranks, given their inputs; `blocks` for AllToAll.
Values expectedOf(const Call& call, const Matrix& blocks, const Values& inputs,
                  const Values& outputs) {
  Values expected = outputs;
  const size_t size = inputs.size(), bytes = call.bytes;
  const auto sum = [&](size_t from, std::vector<std::byte>& into) {
    std::vector<const void*> srcs;
    for (const auto& input : inputs) srcs.push_back(input.data() + from);
    void* dst = into.data();
    reduction::reduce({&dst, 1}, srcs, bytes / sizeOf(call.type), call.type, call.op,
                      {call.op == ReduceOp::PREMUL_SUM, call.op == ReduceOp::AVG, call.factor,
                       static_cast<double>(size)});
  };
  for (size_t rank = 0; rank < size; ++rank) {
    switch (call.operation) {
      case Operation::AllReduce: sum(0, expected[rank]); break;
      case Operation::Reduce:
        if (static_cast<int>(rank) == call.root) sum(0, expected[rank]);
        break;
      case Operation::ReduceScatter: sum(rank * bytes, expected[rank]); break;
      case Operation::Broadcast: expected[rank] = inputs[static_cast<size_t>(call.root)]; break;
      case Operation::Scatter: {
        const auto& all = inputs[static_cast<size_t>(call.root)];
        expected[rank] = {all.begin() + rank * bytes, all.begin() + (rank + 1) * bytes};
        break;
      }
      case Operation::Gather:
        if (static_cast<int>(rank) != call.root) break;
        [[fallthrough]];
      case Operation::AllGather:
        for (size_t s = 0; s < size; ++s) {
          std::copy_n(inputs[s].begin(), bytes, expected[rank].begin() + s * bytes);
        }
        break;
      case Operation::AllToAll: {
        auto into = expected[rank].begin();
        for (size_t s = 0; s < size; ++s) {
          auto from = inputs[s].begin();
          for (size_t d = 0; d < rank; ++d) from += blocks[s][d];
          into = std::copy_n(from, blocks[s][rank], into);
        }
        EXPECT_EQ(into, expected[rank].end());
        break;
      }
    }
  }
  return expected;
}

enum class Sharing { All, None, NotTheLast };

class SharedCallValues
    : public SharedCallTest,
      public testing::WithParamInterface<std::tuple<Operation, int, uint64_t, Sharing>> {
 protected:
  void check(const Call& pattern, Sharing sharing, std::mt19937_64& random) {
    const auto size = static_cast<size_t>(pattern.size);
    const Operation operation = pattern.operation;
    const bool inPlace = operation == Operation::AllReduce || operation == Operation::Reduce ||
                         operation == Operation::Broadcast;
    const bool allToAll = operation == Operation::AllToAll;
    // Random sizes, from 0 to twice the pattern's.
    Matrix blocks(size, std::vector<uint64_t>(size));
    for (auto& row : blocks) {
      for (uint64_t& bytes : row) {
        bytes = pattern.bytes == 0 || random() % 4 == 0 ? 0 : random() % (2 * pattern.bytes);
      }
    }
    // Of one rank.
    const auto inputBytes = [&](size_t rank) -> size_t {
      if (allToAll) return std::accumulate(blocks[rank].begin(), blocks[rank].end(), size_t{0});
      const bool isRoot = static_cast<int>(rank) == pattern.root;
      if (operation == Operation::Scatter) return isRoot ? pattern.bytes * size : 0;
      return pattern.bytes * (operation == Operation::ReduceScatter ? size : 1);
    };
    const auto outputBytes = [&](size_t rank) -> size_t {
      size_t sum = 0;
      for (const auto& row : blocks) sum += row[rank];
      if (allToAll) return sum;
      const bool isRoot = static_cast<int>(rank) == pattern.root;
      if (operation == Operation::Gather) return isRoot ? pattern.bytes * size : 0;
      return pattern.bytes * (operation == Operation::AllGather ? size : 1);
    };
    std::vector<std::unique_ptr<DeviceMemory>> memory;
    Values inputs, outputs;
    std::vector<Buffers> buffers;
    const auto fresh = [&](size_t bytes) {
      memory.push_back(std::make_unique<DeviceMemory>(bytes));
      auto* const numbers = reinterpret_cast<int32_t*>(memory.back()->begin());
      for (size_t i = 0; i < bytes / 4; ++i) numbers[i] = static_cast<int32_t>(random() % 1000);
      return bytes == 0 ? nullptr : memory.back()->begin();
    };
    for (size_t rank = 0; rank < size; ++rank) {
      std::byte* const input = fresh(inputBytes(rank));
      inputs.push_back(memory.back()->copy());
      std::byte* const output = inPlace ? input : fresh(outputBytes(rank));
      outputs.push_back(memory.back()->copy());
      buffers.push_back({input, output, {}});
      for (size_t other = 0; allToAll && other < size; ++other) {
        buffers.back().splits.to[other] = blocks[rank][other];
        buffers.back().splits.from[other] = blocks[other][rank];
      }
      FakeGpu::get().refusesToShare[static_cast<int>(rank)] =
          sharing == Sharing::None || (sharing == Sharing::NotTheLast && rank + 1 == size);
    }
    for (size_t rank = 0; rank < size; ++rank) {
      Call call = pattern;
      call.me = static_cast<int>(rank);
      if (allToAll) call.bytes = 0;
      ranks_[rank]->begin(call, buffers[rank]);
    }
    run(random);
    FakeGpu::get().expectNoRace();
    const Values expected = expectedOf(pattern, blocks, inputs, outputs);
    // Those with anything to open can open it.
    bool direct = true;
    for (size_t rank = 0; rank < size; ++rank) {
      const bool empty = buffers[rank].input == nullptr && buffers[rank].output == nullptr;
      direct = direct && (empty || !FakeGpu::get().refusesToShare[static_cast<int>(rank)]);
    }
    for (size_t rank = 0; rank < size; ++rank) {
      const bool defined = operation != Operation::Reduce || pattern.root == static_cast<int>(rank);
      const std::byte* const output = buffers[rank].output;
      EXPECT_TRUE(!defined || std::equal(expected[rank].begin(), expected[rank].end(), output))
          << "rank " << rank;
      EXPECT_EQ(ranks_[rank]->call().isDirect(), direct);
    }
  }
};

TEST_P(SharedCallValues, AreThoseOfTheCpu) {
  const auto [operation, size, bytes, sharing] = GetParam();
  std::mt19937_64 random(bytes + static_cast<uint64_t>(size));
  meet(size);
  Call call;
  call.operation = operation;
  call.type = DataType::int32;
  call.size = size;
  call.root = size - 1;
  call.bytes = bytes;
  // One after the other, so that the next call meets the state that a call leaves.
  for (const ReduceOp op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX}) {
    call.op = op;
    check(call, sharing, random);
  }
  check(call, Sharing::All, random);
}

INSTANTIATE_TEST_SUITE_P(
    All, SharedCallValues,
    testing::Combine(testing::Values(Operation::AllReduce, Operation::Reduce,
                                     Operation::ReduceScatter, Operation::AllGather,
                                     Operation::Gather, Operation::Broadcast, Operation::Scatter,
                                     Operation::AllToAll),
                     testing::Values(2, 3, 7), testing::Values(0, 4, 1000, 12004),
                     testing::Values(Sharing::All, Sharing::None, Sharing::NotTheLast)));

// --- memory of others ---------------------------------------------------------------------------------------------

TEST_F(SharedCallTest, OpensMemoryOnceAndAgainWhenItIsOther) {
  std::mt19937_64 random(5);
  meet(2);
  Call call;
  call.operation = Operation::AllReduce;
  call.type = DataType::float32;
  call.size = 2;
  call.bytes = 400;
  auto first = std::make_unique<DeviceMemory>(400);
  const DeviceMemory second(400);
  const auto once = [&] {
    for (int me = 0; me < 2; ++me) {
      call.me = me;
      std::byte* const data = me == 0 ? first->begin() : second.begin();
      ranks_[static_cast<size_t>(me)]->begin(call, {data, data, {}});
    }
    run(random);
  };
  FakeGpu& gpu = FakeGpu::get();
  const int before = gpu.opened;
  once();
  EXPECT_EQ(gpu.opened, before + 2);
  once();
  EXPECT_EQ(gpu.opened, before + 2);
  // The same address, but another allocation: the other rank has the old one open.
  gpu.allocations[first->begin()].number = ++gpu.allocated;
  once();
  EXPECT_EQ(gpu.opened, before + 3);
  EXPECT_EQ(gpu.closed, 1);
  ranks_.clear();
  EXPECT_EQ(gpu.closed, gpu.opened);
}

TEST_F(SharedCallTest, TwoGroupsOpenTheSameMemoryOnce) {
  std::mt19937_64 random(6);
  const DeviceMemory first(400), second(400);
  FakeGpu& gpu = FakeGpu::get();
  // The ranks of the second group are the same processes.
  std::vector<std::vector<std::unique_ptr<Rank>>> groups;
  std::vector<Meetings> meetings(2);
  const auto once = [&](size_t group) {
    ranks_.swap(groups[group]);
    Call call;
    call.type = DataType::float32;
    call.size = 2;
    call.bytes = 400;
    for (int me = 0; me < 2; ++me) {
      call.me = me;
      std::byte* const data = me == 0 ? first.begin() : second.begin();
      ranks_[static_cast<size_t>(me)]->begin(call, {data, data, {}});
    }
    run(random);
    ranks_.swap(groups[group]);
  };
  for (size_t group = 0; group < 2; ++group) {
    std::swap(meetings_, meetings[group]);
    meet(2);
    groups.push_back(std::exchange(ranks_, {}));
    std::swap(meetings_, meetings[group]);
  }
  const int workspaces = gpu.opened;
  const auto within = [&](size_t group) {
    std::swap(meetings_, meetings[group]);
    once(group);
    std::swap(meetings_, meetings[group]);
  };
  within(0);
  within(1);
  EXPECT_EQ(gpu.opened, workspaces + 2);
  // One group learns that the memory is gone, and closes it; the other must not open what is already open.
  gpu.allocations[first.begin()].number = ++gpu.allocated;
  within(1);
  EXPECT_EQ(gpu.opened, workspaces + 3);
  EXPECT_EQ(gpu.closed, 1);
  within(0);
  EXPECT_EQ(gpu.opened, workspaces + 3);
  groups.clear();
  EXPECT_EQ(gpu.closed, gpu.opened);
}

// --- refusals -----------------------------------------------------------------------------------------------------

TEST_F(SharedCallTest, FindsRanksInDifferentCalls) {
  for (const bool other : {false, true}) {
    ranks_.clear();
    meetings_ = {};
    meet(2);
    const DeviceMemory memory(64);
    Call call;
    call.size = 2;
    call.bytes = 64;
    call.op = ReduceOp::PREMUL_SUM;
    call.type = DataType::float32;
    call.factor = 0.5;
    ranks_[0]->begin(call, {memory.begin(), memory.begin(), {}});
    call.me = 1;
    if (other) {
      call.op = ReduceOp::MAX;
    } else {
      call.factor = 0.25;
    }
    ranks_[1]->begin(call, {memory.begin(), memory.begin(), {}});
    try {
      for (int steps = 0; steps < 10; ++steps) {
        for (auto& rank : ranks_) rank->advance();
      }
      ADD_FAILURE() << "went on";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::Mismatch);
      EXPECT_THAT(error.what(),
                  HasSubstr("rank 0 is in call 1 (all_reduce of 64 bytes, float32, PREMUL_SUM"));
    }
  }
}

TEST_F(SharedCallTest, FindsBlocksThatAreExpectedToBeLonger) {
  for (const bool shares : {true, false}) {
    ranks_.clear();
    meetings_ = {};
    for (int me = 0; me < 3; ++me) FakeGpu::get().refusesToShare[me] = false;
    meet(3);
    for (int me = 0; me < 3; ++me) FakeGpu::get().refusesToShare[me] = !shares;
    const DeviceMemory memory(64);
    Call call;
    call.operation = Operation::AllToAll;
    call.size = 3;
    for (int me = 0; me < 3; ++me) {
      call.me = me;
      Buffers buffers{memory.begin(), memory.begin(), {}};
      if (me == 1) buffers.splits.to[2] = 8;
      if (me == 2) buffers.splits.from[1] = 12;
      ranks_[static_cast<size_t>(me)]->begin(call, buffers);
    }
    // Also the rank that is neither of the two.
    std::vector<std::string> said(3);
    for (int steps = 0; steps < 10; ++steps) {
      for (size_t me = 0; me < 3; ++me) {
        try {
          if (said[me].empty()) ranks_[me]->advance();
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::Mismatch);
          said[me] = error.what();
        }
      }
    }
    for (const std::string& text : said) {
      EXPECT_THAT(text, HasSubstr("in call 1 (all_to_all), part 0 on the GPU rank 1 sends 8 bytes "
                                  "to rank 2, which expects 12"));
    }
  }
}

TEST_F(SharedCallTest, TellsWhyMemoryCannotBeShared) {
  FakeGpu::get().refusesToShare[1] = true;
  std::vector<Introduction> said;
  for (int me = 0; me < 2; ++me) {
    ranks_.push_back(std::make_unique<Rank>(me, 2, 4096, meetings_));
    said.push_back(ranks_.back()->gpu.introduce());
  }
  EXPECT_THAT(refusalOf(said), HasSubstr("rank 1: sharing memory of the GPU: the fake says no"));

  FakeGpu::get().refusesToShare[1] = false;
  ranks_.clear();
  said.clear();
  for (int me = 0; me < 2; ++me) {
    ranks_.push_back(std::make_unique<Rank>(me, 2, me == 0 ? 4096 : 8192, meetings_));
    said.push_back(ranks_.back()->gpu.introduce());
  }
  EXPECT_THAT(ranks_[0]->gpu.connect(said), HasSubstr("rank 1 has a workspace of 8192 bytes"));
  FakeGpu::get().refusesToOpen = true;
  EXPECT_THAT(ranks_[1]->gpu.connect(said), HasSubstr("rank 0 has a workspace of 4096 bytes"));
}

TEST_F(SharedCallTest, KnowsWhenItsMemoryIsExposed) {
  std::mt19937_64 random(1);
  meet(2);
  const DeviceMemory memory(64);
  Call call;
  call.size = 2;
  call.bytes = 64;
  for (int me = 0; me < 2; ++me) {
    call.me = me;
    ranks_[static_cast<size_t>(me)]->begin(call, {memory.begin(), memory.begin(), {}});
    EXPECT_FALSE(ranks_[static_cast<size_t>(me)]->call().isExposed());
  }
  run(random);
  EXPECT_TRUE(ranks_[0]->call().isExposed());
  ranks_[0]->call().end();
  EXPECT_FALSE(ranks_[0]->call().isExposed());
}

}  // namespace
}  // namespace smddp::cuda
