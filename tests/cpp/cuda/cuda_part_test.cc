// The functions of libsmddp_cuda.so, as they are compiled for a GPU, on a made-up CUDA: what they return, in which
// context they work, and in which state they leave the thread.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "cuda/device_table.h"
#include "cuda/kernels/launch.cuh"
#include "made_up_cuda.h"
#include "reduction/reduce.h"

extern "C" const smddp::cuda::DeviceTable* smddp_device_table();
extern "C" const smddp::cuda::DeviceTable* smddp_device_table_of_earlier_cuda();

namespace smddp::cuda {
namespace {

namespace cuda = made_up_cuda;

std::vector<std::string> functionsOf(const std::vector<cuda::Call>& calls) {
  std::vector<std::string> names;
  for (const cuda::Call& call : calls) names.push_back(call.function);
  return names;
}
using Names = std::vector<std::string>;

class CudaPartTest : public testing::Test {
 protected:
  CudaPartTest() { cuda::reset(); }
  // After any call: no error is left for a later call of this thread.
  ~CudaPartTest() override {
    EXPECT_EQ(cuda::lastError(), cudaSuccess);
    cuda::reset();
  }

  std::byte* allocate(size_t bytes, int device = 0) {
    void* memory = nullptr;
    EXPECT_EQ(table_.allocate(device, bytes, &memory), 0);
    return static_cast<std::byte*>(memory);
  }

  // A sum of two vectors of floats, into the first destinations.
  Job sumOf(const void* a, const void* b, void* into, uint64_t count) {
    Job job;
    job.type = DataType::float32;
    job.count = count;
    job.numSrcs = 2;
    job.srcs[0] = a;
    job.srcs[1] = b;
    job.numDsts = 1;
    job.dsts[0] = into;
    return job;
  }
  Job copyOf(const void* from, std::vector<void*> into, uint64_t bytes) {
    Job job;
    job.count = bytes;
    job.numSrcs = 1;
    job.srcs[0] = from;
    for (void* const one : into) job.dsts[job.numDsts++] = one;
    return job;
  }

  const DeviceTable& table_ = *smddp_device_table();
};

// --- memory -------------------------------------------------------------------------------------------------------

TEST_F(CudaPartTest, TableIsOfThisVersion) {
  EXPECT_EQ(table_.version, kTableVersion);
  EXPECT_EQ(table_.bytes, sizeof(DeviceTable));
  EXPECT_STREQ(table_.release, SMDDP_VERSION);
  EXPECT_STREQ(table_.textOf(cudaErrorInvalidValue), "invalid argument");
  EXPECT_STREQ(table_.textOf(cudaErrorMemoryAllocation), "out of memory");
  EXPECT_STRNE(table_.textOf(63), "");
}

TEST_F(CudaPartTest, MemoryComesAndGoes) {
  std::byte* const memory = allocate(1000);
  std::memset(memory, 1, 1000);
  EXPECT_EQ(table_.free(0, memory), 0);
  EXPECT_EQ(table_.free(0, memory), cudaErrorInvalidValue);
  void* tooMuch = nullptr;
  EXPECT_EQ(table_.allocate(0, size_t{1} << 50, &tooMuch), cudaErrorMemoryAllocation);
}

TEST_F(CudaPartTest, NamesTellAllocationsApart) {
  std::byte* const memory = allocate(1000);
  std::byte* const another = allocate(1000);
  MemoryName name, inside, other;
  ASSERT_EQ(table_.nameOf(0, memory, &name), 0);
  ASSERT_EQ(table_.nameOf(0, memory + 999, &inside), 0);
  MemoryRange range;
  ASSERT_EQ(table_.rangeOf(0, memory + 999, &range), 0);
  EXPECT_EQ(range.base, reinterpret_cast<uint64_t>(memory));
  EXPECT_EQ(range.bytes, 1000u);
  EXPECT_EQ(range.allocation, name.allocation);
  ASSERT_EQ(table_.nameOf(0, another, &other), 0);
  EXPECT_EQ(name.base, reinterpret_cast<uint64_t>(memory));
  EXPECT_EQ(name.offset, 0u);
  EXPECT_EQ(inside.base, name.base);
  EXPECT_EQ(inside.offset, 999u);
  EXPECT_EQ(inside.allocation, name.allocation);
  EXPECT_EQ(std::memcmp(inside.handle, name.handle, sizeof name.handle), 0);
  EXPECT_NE(other.allocation, name.allocation);
  EXPECT_NE(std::memcmp(other.handle, name.handle, sizeof name.handle), 0);

  // The same address, but another allocation, with a handle of its own.
  ASSERT_EQ(table_.free(0, memory), 0);
  ASSERT_EQ(allocate(1000), memory);
  MemoryName again;
  ASSERT_EQ(table_.nameOf(0, memory, &again), 0);
  EXPECT_EQ(again.base, name.base);
  EXPECT_NE(again.allocation, name.allocation);
  EXPECT_NE(std::memcmp(again.handle, name.handle, sizeof name.handle), 0);
}

// The driver is slow to make a handle: it makes one for each allocation.
TEST_F(CudaPartTest, HandlesAreMadeOnce) {
  const auto handlesMade = [] {
    const Names names = functionsOf(cuda::takeCalls());
    return std::count(names.begin(), names.end(), "cudaIpcGetMemHandle");
  };
  // More than are remembered.
  std::vector<std::byte*> memory;
  for (int i = 0; i < 1500; ++i) memory.push_back(allocate(64));
  std::map<uint64_t, std::vector<uint8_t>> handles;
  cuda::takeCalls();
  for (std::byte* const data : memory) {
    for (int offset : {0, 1, 63}) {
      MemoryName name;
      ASSERT_EQ(table_.nameOf(0, data + offset, &name), 0);
      ASSERT_EQ(name.base, reinterpret_cast<uint64_t>(data));
      const std::vector<uint8_t> handle(name.handle, name.handle + sizeof name.handle);
      ASSERT_EQ(handles.emplace(name.allocation, handle).first->second, handle);
    }
  }
  EXPECT_EQ(handles.size(), memory.size());
  EXPECT_EQ(handlesMade(), static_cast<ptrdiff_t>(memory.size()));
  for (std::byte* const data : memory) {
    MemoryName name;
    ASSERT_EQ(table_.nameOf(0, data, &name), 0);
    const std::vector<uint8_t> handle(name.handle, name.handle + sizeof name.handle);
    ASSERT_EQ(handles.at(name.allocation), handle);
  }
}

TEST_F(CudaPartTest, MemoryThatCannotBeSharedHasNoName) {
  std::byte* const memory = allocate(1000);
  cuda::refuseToShare(memory);
  MemoryName name;
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(table_.nameOf(0, memory + 8, &name), cudaErrorNotSupported);
    MemoryRange range;
    EXPECT_EQ(table_.rangeOf(0, memory + 8, &range), cudaErrorNotSupported);
    EXPECT_EQ(cuda::lastError(), cudaSuccess);
  }
  int onTheHost = 0;
  EXPECT_NE(table_.nameOf(0, &onTheHost, &name), 0);
  EXPECT_NE(table_.nameOf(0, nullptr, &name), 0);
}

TEST_F(CudaPartTest, MemoryOfOthersIsOpenedAndClosed) {
  const cuda::Exported other = cuda::exportElsewhere(1, 256);
  uint8_t handle[64];
  std::memcpy(handle, &other.handle, sizeof handle);
  void* base = nullptr;
  ASSERT_EQ(table_.open(1, handle, &base), 0);
  EXPECT_EQ(base, other.base);
  ASSERT_EQ(table_.open(1, handle, &base), 0);
  EXPECT_EQ(cuda::timesOpen(base), 2);

  // It can be copied from like any other.
  std::byte* const memory = allocate(256, 1);
  std::memset(base, 7, 256);
  const Job job = copyOf(base, {memory}, 256);
  cudaStream_t const stream = cuda::newStream(1);
  ASSERT_EQ(table_.run(1, &job, stream), 0);
  cuda::finish(stream);
  EXPECT_EQ(std::memcmp(memory, base, 256), 0);

  EXPECT_EQ(table_.close(1, base), 0);
  EXPECT_EQ(table_.close(1, base), 0);
  EXPECT_EQ(cuda::timesOpen(base), 0);
  EXPECT_EQ(table_.close(1, base), cudaErrorInvalidValue);
  EXPECT_EQ(table_.run(1, &job, stream), cudaErrorInvalidValue);

  EXPECT_NE(table_.open(0, handle, &base), 0);  // another GPU's
  MemoryName own;
  ASSERT_EQ(table_.nameOf(1, memory, &own), 0);
  EXPECT_NE(table_.open(1, own.handle, &base), 0);
  EXPECT_EQ(cuda::lastError(), cudaSuccess);
}

// --- jobs ---------------------------------------------------------------------------------------------------------

TEST_F(CudaPartTest, JobsRunInTheOrderOfTheirStream) {
  auto* const numbers = reinterpret_cast<float*>(allocate(3 * sizeof(float)));
  numbers[0] = 1;
  numbers[1] = 2;
  numbers[2] = 0;
  cudaStream_t const stream = cuda::newStream(0);
  cudaStream_t const another = cuda::newStream(0);
  Job job = sumOf(&numbers[0], &numbers[1], &numbers[2], 1);
  ASSERT_EQ(table_.run(0, &job, stream), 0);
  job = copyOf(&numbers[2], {&numbers[0]}, sizeof(float));
  ASSERT_EQ(table_.run(0, &job, stream), 0);
  job = sumOf(&numbers[0], &numbers[2], &numbers[1], 1);
  ASSERT_EQ(table_.run(0, &job, stream), 0);
  job = Job{};

  EXPECT_EQ(cuda::pending(stream), 3u);
  EXPECT_EQ(cuda::pending(another), 0u);
  EXPECT_EQ(numbers[2], 0);
  cuda::finish(stream);
  EXPECT_EQ(numbers[2], 3);
  EXPECT_EQ(numbers[0], 3);
  EXPECT_EQ(numbers[1], 6);
}

// torch's current stream usually is the default one.
TEST_F(CudaPartTest, NullIsTheDefaultStreamOfTheDevice) {
  for (const int device : {0, 1}) {
    auto* const numbers = reinterpret_cast<float*>(allocate(3 * sizeof(float), device));
    const Job sum = sumOf(numbers, numbers, numbers + 1, 1);
    const Job copy = copyOf(numbers + 1, {numbers + 2}, sizeof(float));
    numbers[0] = 4;
    ASSERT_EQ(table_.run(device, &sum, nullptr), 0);
    ASSERT_EQ(table_.run(device, &copy, nullptr), 0);
    EXPECT_EQ(cuda::pending(cuda::defaultStream(device)), 2u);
    cuda::finish(cuda::defaultStream(device));
    EXPECT_EQ(numbers[2], 8);
  }
}

TEST_F(CudaPartTest, StreamsOfAnotherDeviceAreRefused) {
  auto* const memory = allocate(64);
  const Job sum = sumOf(memory, memory, memory, 4);
  const Job copy = copyOf(memory, {memory + 32}, 16);
  cudaStream_t const stream = cuda::newStream(1);
  EXPECT_EQ(table_.run(0, &sum, stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(table_.run(0, &copy, stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cuda::pending(stream), 0u);
}

// So many blocks as fill all processors, but none without work.
TEST_F(CudaPartTest, GridsFitTheirWork) {
  std::byte* const memory = allocate(2 << 20);
  cudaStream_t const stream = cuda::newStream(0);
  struct Case {
    uint64_t count, offset;
    unsigned blocks;
  };
  for (const int processors : {1, 3}) {
    cuda::setProcessors(processors);
    const auto most = static_cast<unsigned>(4 * processors);
    for (const Case& one : {
             Case{1, 0, 1},
             Case{4 * kThreads, 0, 1},
             Case{4 * kThreads + 1, 0, 2},
             Case{kThreads, 4, 1},
             Case{kThreads + 1, 4, 2},
             Case{100000, 0, most},
             Case{100000, 4, most},
         }) {
      const Job job = sumOf(memory, memory + (1 << 20), memory + one.offset, one.count);
      ASSERT_EQ(table_.run(0, &job, stream), 0);
      const auto launches = cuda::takeLaunches();
      ASSERT_EQ(launches.size(), 1u);
      EXPECT_EQ(launches[0].grid.x, one.blocks) << one.count << " at " << one.offset;
      EXPECT_EQ(launches[0].block.x, static_cast<unsigned>(kThreads));
      EXPECT_EQ(launches[0].stream, stream);
    }
  }
}

TEST_F(CudaPartTest, CopiesAreCopiesHoweverTheyAreCalled) {
  std::byte* const memory = allocate(4096);
  std::mt19937 random(1);
  cudaStream_t const stream = cuda::newStream(0);
  // NaNs, and bools that are neither 0 nor 1, keep their bits.
  for (const ReduceOp op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MIN, ReduceOp::PREMUL_SUM}) {
    for (const DataType type : {DataType::float16, DataType::boolean, DataType::complex128}) {
      for (const size_t numDsts : {1, 3}) {
        for (int i = 0; i < 4096; ++i) memory[i] = static_cast<std::byte>(random());
        std::vector<std::byte> expected(memory, memory + 4096);
        Job job = copyOf(memory, {}, 48);
        job.type = type;
        job.op = op;
        for (size_t d = 0; d < numDsts; ++d) {
          job.dsts[job.numDsts++] = memory + 1024 * (d + 1);
          std::memcpy(expected.data() + 1024 * (d + 1), memory, 48 * sizeOf(type));
        }
        cuda::takeCalls();
        ASSERT_EQ(table_.run(0, &job, stream), 0);
        EXPECT_EQ(functionsOf(cuda::takeCalls()),
                  numDsts == 1 ? Names{"cudaMemcpyAsync"}
                               : (Names{"cudaDeviceGetAttribute", "cudaLaunchKernelEx"}));
        EXPECT_EQ(cuda::pending(stream), 1u);
        cuda::finish(stream);
        EXPECT_EQ(std::memcmp(memory, expected.data(), 4096), 0);
      }
    }
  }
}

// In CUDA source and destination of a copy must not overlap.
TEST_F(CudaPartTest, CopiesOntoThemselvesAreNothing) {
  std::byte* const memory = allocate(128);
  cudaStream_t const stream = cuda::newStream(0);
  Job job = copyOf(memory, {memory}, 64);
  EXPECT_EQ(table_.run(0, &job, stream), 0);
  EXPECT_EQ(cuda::pending(stream), 0u);
  std::memset(memory, 5, 64);
  std::memset(memory + 64, 6, 64);
  job = copyOf(memory, {memory + 64, memory}, 64);
  EXPECT_EQ(table_.run(0, &job, stream), 0);
  cuda::finish(stream);
  EXPECT_EQ(std::memcmp(memory, memory + 64, 64), 0);
}

TEST_F(CudaPartTest, NothingToDoIsNoError) {
  std::byte* const memory = allocate(64);
  cudaStream_t const stream = cuda::newStream(0);
  Job job = sumOf(memory, memory, memory, 0);
  EXPECT_EQ(table_.run(0, &job, stream), 0);
  job = sumOf(memory, memory, memory, 4);
  job.numDsts = 0;
  EXPECT_EQ(table_.run(0, &job, stream), 0);
  EXPECT_EQ(cuda::pending(stream), 0u);
}

TEST_F(CudaPartTest, BadJobsAreRefused) {
  std::byte* const memory = allocate(64);
  cudaStream_t const stream = cuda::newStream(0);
  const auto refused = [&](const std::function<void(Job&)>& spoil) {
    for (const int sources : {1, 2}) {
      Job job = sumOf(memory, memory + 16, memory + 32, 4);
      job.numSrcs = sources;
      spoil(job);
      EXPECT_EQ(table_.run(0, &job, stream), cudaErrorInvalidValue);
      EXPECT_EQ(cuda::lastError(), cudaSuccess);
    }
  };
  for (const int sources : {-1, 0, kMaxSharing + 1, 1 << 30}) {
    refused([&](Job& job) { job.numSrcs = sources; });
  }
  for (const int destinations : {-1, kMaxSharing + 1, 1 << 30}) {
    refused([&](Job& job) { job.numDsts = destinations; });
  }
  refused([](Job& job) { job.type = static_cast<DataType>(kNumDataTypes); });
  refused([](Job& job) {
    job.numSrcs = 2;
    job.op = static_cast<ReduceOp>(kNumReduceOps);
  });
  EXPECT_EQ(cuda::pending(stream), 0u);
}

// --- contexts and errors ------------------------------------------------------------------------------------------

// Every function that works on a device, and the functions of CUDA that it calls.
struct Function {
  const char* name;
  std::function<int(const DeviceTable&, int device)> call;
  Names calls;
};

// Arguments of the functions. They are made before, so that a call allocates only what it makes itself.
struct Given {
  void *memory[cuda::kDevices], *another[cuda::kDevices], *opened[cuda::kDevices];
  uint8_t handle[cuda::kDevices][64];
  cudaStream_t stream[cuda::kDevices];

  explicit Given(const DeviceTable& table) {
    for (int device = 0; device < cuda::kDevices; ++device) {
      EXPECT_EQ(table.allocate(device, 256, &memory[device]), 0);
      EXPECT_EQ(table.allocate(device, 256, &another[device]), 0);
      const auto exported = cuda::exportElsewhere(device, 64);
      std::memcpy(handle[device], &exported.handle, 64);
      EXPECT_EQ(table.open(device, handle[device], &opened[device]), 0);
      stream[device] = cuda::newStream(device);
    }
    cuda::takeCalls();
  }

  Job job(int device, int numSrcs) const {
    Job job;
    job.count = 64;
    job.numSrcs = numSrcs;
    job.numDsts = 1;
    job.srcs[0] = job.srcs[1] = memory[device];
    job.dsts[0] = another[device];
    return job;
  }

  std::vector<Function> functions() const {
    return {
        {"allocate",
         [](const DeviceTable& table, int device) {
           void* more = nullptr;
           return table.allocate(device, 64, &more);
         },
         {"cudaMalloc"}},
        {"free",
         [this](const DeviceTable& table, int device) {
           return table.free(device, memory[device]);
         },
         {"cudaFree"}},
        {"rangeOf",
         [this](const DeviceTable& table, int device) {
           MemoryRange range;
           return table.rangeOf(device, memory[device], &range);
         },
         {"cuMemGetAddressRange", "cuPointerGetAttribute"}},
        {"nameOf",
         [this](const DeviceTable& table, int device) {
           MemoryName name;
           return table.nameOf(device, memory[device], &name);
         },
         {"cuMemGetAddressRange", "cuPointerGetAttribute", "cudaIpcGetMemHandle"}},
        {"open",
         [this](const DeviceTable& table, int device) {
           void* base = nullptr;
           return table.open(device, handle[device], &base);
         },
         {"cudaIpcOpenMemHandle"}},
        {"close",
         [this](const DeviceTable& table, int device) {
           return table.close(device, opened[device]);
         },
         {"cudaIpcCloseMemHandle"}},
        {"copy",
         [this](const DeviceTable& table, int device) {
           const Job copy = job(device, 1);
           return table.run(device, &copy, stream[device]);
         },
         {"cudaMemcpyAsync"}},
        {"reduce",
         [this](const DeviceTable& table, int device) {
           const Job sum = job(device, 2);
           return table.run(device, &sum, stream[device]);
         },
         {"cudaDeviceGetAttribute", "cudaLaunchKernelEx"}},
    };
  }
};

// The contexts that a thread may have when it calls.
std::vector<std::vector<CUcontext>> contextsBefore() {
  return {{},
          {cuda::primaryContext(0)},
          {cuda::primaryContext(1)},
          {cuda::otherContext(0)},
          {cuda::otherContext(1), cuda::primaryContext(0)}};
}

class EveryFunctionTest : public CudaPartTest,
                          public testing::WithParamInterface<const DeviceTable* (*)()> {
 protected:
  // Calls each function on each device in each state of the thread, once for each thing that may fail in it, and checks
  // what is left. A call that fails must leave its arguments usable for the next one.
  void forAll(const std::function<std::vector<std::string>(const Function&)>& whatMayFail,
              const std::function<void(const Function&, int device, const std::string& failing)>&
                  callAndCheck) {
    const size_t numFunctions = Given(table()).functions().size();
    for (size_t f = 0; f < numFunctions; ++f) {
      for (const int device : {0, 1}) {
        for (const auto& before : contextsBefore()) {
          cuda::reset();
          const Given given(table());
          const Function function = given.functions()[f];
          for (const std::string& failing : whatMayFail(function)) {
            SCOPED_TRACE(fmt::format("{} on device {}, {} contexts before, failing: {}",
                                     function.name, device, before.size(), failing));
            cuda::contexts() = before;
            cuda::takeCalls();
            callAndCheck(function, device, failing);
            EXPECT_EQ(cuda::contexts(), before);
            EXPECT_EQ(cuda::lastError(), cudaSuccess);
            for (const cuda::Call& call : cuda::takeCalls()) {
              EXPECT_EQ(call.context, cuda::primaryContext(device)) << call.function;
            }
          }
        }
      }
    }
    cuda::contexts().clear();
  }
  const DeviceTable& table() { return *GetParam()(); }
};

TEST_P(EveryFunctionTest, WorksInThePrimaryContextAndLeavesTheThreadAsItWas) {
  forAll([](const Function&) { return Names{"nothing"}; },
         [&](const Function& function, int device, const std::string&) {
           EXPECT_EQ(function.call(table(), device), 0);
         });
  // Each of the two libraries in this test keeps the context.
  for (const int device : {0, 1}) EXPECT_LE(cuda::timesRetained(device), 2);
}

TEST_P(EveryFunctionTest, ReturnsTheErrorsOfCudaAndForgetsThem) {
  forAll([](const Function& function) { return function.calls; },
         [&](const Function& function, int device, const std::string& failing) {
           cuda::failNext(failing, cudaErrorNotSupported);
           const bool ofTheDriver = failing.starts_with("cu") && !failing.starts_with("cuda");
           EXPECT_EQ(function.call(table(), device),
                     ofTheDriver ? cudaErrorInvalidValue : cudaErrorNotSupported);
         });
}

TEST_P(EveryFunctionTest, ReturnsAnErrorWhereThereIsNoContext) {
  forAll([](const Function&) { return Names{"cuCtxPushCurrent"}; },
         [&](const Function& function, int device, const std::string& failing) {
           cuda::failNext(failing, CUDA_ERROR_INVALID_CONTEXT);
           EXPECT_EQ(function.call(table(), device), cudaErrorInvalidDevice);
           EXPECT_EQ(functionsOf(cuda::takeCalls()), Names{});
         });
}

TEST_P(EveryFunctionTest, RefusesDevicesThatAreNotThere) {
  const Given given(table());
  const Job job = given.job(0, 2);
  for (const int device : {-1, cuda::kDevices}) {
    void* memory = nullptr;
    MemoryName name;
    EXPECT_EQ(table().allocate(device, 64, &memory), cudaErrorInvalidDevice);
    EXPECT_EQ(table().free(device, given.memory[0]), cudaErrorInvalidDevice);
    EXPECT_EQ(table().nameOf(device, given.memory[0], &name), cudaErrorInvalidDevice);
    EXPECT_EQ(table().open(device, given.handle[0], &memory), cudaErrorInvalidDevice);
    EXPECT_EQ(table().close(device, given.opened[0]), cudaErrorInvalidDevice);
    EXPECT_EQ(table().run(device, &job, given.stream[0]), cudaErrorInvalidDevice);
    EXPECT_TRUE(cuda::contexts().empty());
  }
}

INSTANTIATE_TEST_SUITE_P(Of, EveryFunctionTest,
                         testing::Values(&smddp_device_table, &smddp_device_table_of_earlier_cuda),
                         [](const auto& info) { return info.index == 0 ? "Cuda13" : "Cuda12_4"; });

// --- what a process finds once, each time in one of its own -------------------------------------------------------

using CudaPartDeathTest = CudaPartTest;

// Runs `check` where nothing has been found yet: in another process, which begins this test anew. Its output has what
// is wrong there.
#define EXPECT_IN_NEW_PROCESS(check)                     \
  GTEST_FLAG_SET(death_test_style, "threadsafe");        \
  EXPECT_EXIT(                                           \
      {                                                  \
        check();                                         \
        std::_Exit(testing::Test::HasFailure() ? 1 : 0); \
      },                                                 \
      testing::ExitedWithCode(0), "")

void withoutAFunctionForContexts(const char* missing) {
  cuda::hide(missing);
  const DeviceTable& table = *smddp_device_table();
  int onTheHost[64] = {};
  const Job job = [&] {
    Job one;
    one.count = one.numSrcs = one.numDsts = 1;
    one.srcs[0] = &onTheHost[0];
    one.dsts[0] = &onTheHost[1];
    return one;
  }();
  const uint8_t handle[64] = {};
  void* memory = nullptr;
  MemoryName name;
  MemoryRange range;
  cuda::contexts() = {cuda::otherContext(1)};
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(table.allocate(0, 64, &memory), cudaErrorInsufficientDriver);
    EXPECT_EQ(table.free(0, onTheHost), cudaErrorInsufficientDriver);
    EXPECT_EQ(table.rangeOf(0, onTheHost, &range), cudaErrorInsufficientDriver);
    EXPECT_EQ(table.nameOf(0, onTheHost, &name), cudaErrorInsufficientDriver);
    EXPECT_EQ(table.open(0, handle, &memory), cudaErrorInsufficientDriver);
    EXPECT_EQ(table.close(0, onTheHost), cudaErrorInsufficientDriver);
    EXPECT_EQ(table.run(0, &job, nullptr), cudaErrorInsufficientDriver);
  }
  EXPECT_EQ(cuda::contexts(), std::vector{cuda::otherContext(1)});
  EXPECT_EQ(cuda::lastError(), cudaSuccess);
  EXPECT_EQ(functionsOf(cuda::takeCalls()), Names{});
}

void withoutAFunctionForNames(const char* missing) {
  cuda::hide(missing);
  const DeviceTable& table = *smddp_device_table();
  void* memory = nullptr;
  MemoryName name;
  EXPECT_EQ(table.allocate(0, 64, &memory), 0);
  EXPECT_EQ(table.nameOf(0, memory, &name), cudaErrorNotSupported);
  EXPECT_EQ(table.free(0, memory), 0);
  EXPECT_EQ(cuda::lastError(), cudaSuccess);
  EXPECT_TRUE(cuda::contexts().empty());
}

// No driver at all.
void withoutADriver() {
  cuda::failAlways("cudaGetDriverEntryPoint", cudaErrorInsufficientDriver);
  withoutAFunctionForContexts("cuCtxPushCurrent");
}

// The next call asks for the context again.
void whereTheContextComesLater() {
  cuda::failNext("cuDevicePrimaryCtxRetain", CUDA_ERROR_OUT_OF_MEMORY);
  const DeviceTable& table = *smddp_device_table();
  void* memory = nullptr;
  EXPECT_EQ(table.allocate(1, 64, &memory), cudaErrorInvalidDevice);
  EXPECT_TRUE(cuda::contexts().empty());
  EXPECT_EQ(table.allocate(1, 64, &memory), 0);
  EXPECT_EQ(table.free(1, memory), 0);
  EXPECT_EQ(cuda::timesRetained(1), 1);  // kept
  EXPECT_EQ(cuda::timesRetained(0), 0);  // nothing was done there
}

TEST_F(CudaPartDeathTest, NeedsTheFunctionsForContexts) {
  for (const char* missing : {"cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuCtxPopCurrent"}) {
    EXPECT_IN_NEW_PROCESS([&] { withoutAFunctionForContexts(missing); });
  }
}

TEST_F(CudaPartDeathTest, NeedsTheFunctionsForNamesWhereItNames) {
  for (const char* missing : {"cuMemGetAddressRange", "cuPointerGetAttribute"}) {
    EXPECT_IN_NEW_PROCESS([&] { withoutAFunctionForNames(missing); });
  }
}

TEST_F(CudaPartDeathTest, NeedsADriver) { EXPECT_IN_NEW_PROCESS(withoutADriver); }

TEST_F(CudaPartDeathTest, KeepsNoErrorOfAContext) {
  EXPECT_IN_NEW_PROCESS(whereTheContextComesLater);
}

// --- threads ------------------------------------------------------------------------------------------------------

TEST_F(CudaPartTest, ThreadsDoNotDisturbOneAnother) {
  constexpr int kThreadsOfTest = 6, kRounds = 50;
  constexpr size_t kCount = 700;
  std::atomic<int> wrong{0};
  std::mutex mutex;
  std::set<uint64_t> allocations;
  const auto work = [&](int number) {
    std::mt19937 random(static_cast<unsigned>(number));
    const auto expect = [&](bool isTrue) { wrong += isTrue ? 0 : 1; };
    const auto before = contextsBefore()[static_cast<size_t>(number) % contextsBefore().size()];
    cuda::contexts() = before;
    cudaStream_t const streams[] = {cuda::newStream(0), cuda::newStream(1)};
    for (int round = 0; round < kRounds; ++round) {
      const int device = static_cast<int>(random() % 2);
      void* memory = nullptr;
      expect(table_.allocate(device, 3 * kCount * sizeof(float), &memory) == 0);
      auto* const numbers = static_cast<float*>(memory);
      for (size_t i = 0; i < 2 * kCount; ++i) numbers[i] = static_cast<float>(random() % 1000);
      const Job job = sumOf(numbers, numbers + kCount, numbers + 2 * kCount, kCount);
      expect(table_.run(device, &job, streams[device]) == 0);
      expect(table_.run(1 - device, &job, streams[device]) == cudaErrorInvalidResourceHandle);
      cuda::finish(streams[device]);
      for (size_t i = 0; i < kCount; ++i) {
        expect(numbers[2 * kCount + i] == numbers[i] + numbers[kCount + i]);
      }
      MemoryName name;
      expect(table_.nameOf(device, numbers, &name) == 0);
      {
        const std::lock_guard lock(mutex);
        expect(allocations.insert(name.allocation).second);
      }
      expect(table_.free(device, memory) == 0);
      expect(cuda::contexts() == before);
      expect(cuda::lastError() == cudaSuccess);
    }
  };
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreadsOfTest; ++number) threads.emplace_back(work, number);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace smddp::cuda
