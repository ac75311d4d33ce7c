// Throughput of the reduction kernels, compared with memcpy, in bytes of one buffer per second. For the formats between
// nodes these are the bytes of the float32 vector, encoded or not.
//
//   cmake --build <folder> --target reduction_bench
//   <folder>/benchmarks/reduction_bench --benchmark_filter=float32
//
// A reduction of n sources moves (n + 1) / 2 times the bytes of a memcpy of the same buffer.
#include <cstring>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "reduction/kernel_table.h"

namespace smddp::reduction {
namespace {

// Zeros in every format, so that repeated sums in place stay zero.
using Buffer = std::vector<double>;

void runReduce(benchmark::State& state, SimdLevel level, DataType type, size_t numSrcs,
               size_t numDsts) {
  const size_t bytes = state.range(0);
  std::vector<Buffer> buffers(numSrcs + 1, Buffer(bytes / sizeof(double)));
  std::vector<const void*> srcs;
  std::vector<void*> dsts;
  for (size_t s = 0; s < numSrcs; ++s) srcs.push_back(buffers[s].data());
  // Several destinations are the sources themselves, as in the zero-copy allreduce.
  for (size_t d = 0; d < numDsts; ++d)
    dsts.push_back(numDsts > 1 ? buffers[d].data() : buffers.back().data());
  const size_t count = bytes / sizeOf(type);
  for (auto _ : state) {
    reduceWith(*kernelsOf(level), dsts, srcs, count, type, ReduceOp::SUM, {});
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * bytes));
}

// One step of an allreduce between nodes.
struct EncodedCase {
  const char* name;
  size_t numSrcs;
  bool fromEncoded, toEncoded, hasResidual;
};
constexpr EncodedCase kEncodedCases[] = {
    {"encode", 1, false, true, false},
    {"encode_residual", 1, false, true, true},
    {"decode", 1, true, false, false},
    {"sum4_encoded", 4, true, true, false},
};

void runEncoded(benchmark::State& state, SimdLevel level, Wire wire, const EncodedCase& what) {
  const size_t bytes = state.range(0), count = bytes / sizeof(float);
  std::vector<float> numbers(count), residual(count);
  for (size_t i = 0; i < count; ++i) numbers[i] = static_cast<float>(i % 1001) - 500;
  std::vector<Buffer> buffers(what.numSrcs + 1, Buffer(bytes / sizeof(double)));
  const Source plain{numbers.data(), false};
  std::vector<Source> srcs;
  for (size_t s = 0; s < what.numSrcs; ++s) {
    const Destination dst{buffers[s].data(), what.fromEncoded};
    reduceEncoded(wire, {&dst, 1}, {&plain, 1}, count, ReduceOp::SUM);
    srcs.push_back({dst.data, dst.isEncoded});
  }
  const Destination dst{buffers.back().data(), what.toEncoded};
  for (auto _ : state) {
    reduceEncodedWith(*kernelsOf(level), wire, {&dst, 1}, srcs, count, ReduceOp::SUM, {},
                      what.hasResidual ? residual.data() : nullptr);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * bytes));
}

void runMemcpy(benchmark::State& state) {
  const size_t bytes = state.range(0);
  Buffer from(bytes / sizeof(double)), to(from);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * bytes));
}

void registerSizes(benchmark::internal::Benchmark* benchmark) {
  for (int64_t bytes : {8, 4 << 10, 256 << 10, 16 << 20}) benchmark->Arg(bytes);
}

const bool kRegistered = [] {
  registerSizes(benchmark::RegisterBenchmark("memcpy", runMemcpy));
  for (SimdLevel level : {SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512}) {
    if (kernelsOf(level) == nullptr) continue;
    for (DataType type : {DataType::float32, DataType::float16, DataType::bfloat16})
      for (size_t numSrcs : {2, 4, 8})
        for (size_t numDsts : {size_t{1}, numSrcs}) {
          const std::string name =
              fmt::format("{}/{}/{}to{}", toString(level), toString(type), numSrcs, numDsts);
          registerSizes(benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
            runReduce(state, level, type, numSrcs, numDsts);
          }));
        }
    for (Wire wire : {Wire::fp32, Wire::bf16, Wire::int8})
      for (const EncodedCase& what : kEncodedCases) {
        const std::string name =
            fmt::format("{}/wire_{}/{}", toString(level), toString(wire), what.name);
        registerSizes(benchmark::RegisterBenchmark(
            name.c_str(), [=](benchmark::State& state) { runEncoded(state, level, wire, what); }));
      }
  }
  return true;
}();

}  // namespace
}  // namespace smddp::reduction
