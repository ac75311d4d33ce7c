// The engine without torch: handing actions to the engine's owner, and whole allreduces.
//
//   cmake --build <folder> --target engine_bench && <folder>/benchmarks/engine_bench
//
// Ranks are threads of one process, as in the C++ tests. Allreduces are of float32, in ordinary memory, in place.
#include <atomic>
#include <semaphore>
#include <vector>

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "support/ranks.h"

namespace smddp::engine {
namespace {

using collectives::Collective;

calls::Request allreduce(std::vector<float>& vector, bool willWait) {
  calls::Request request;
  request.collective = Collective::AllReduce;
  request.type = DataType::float32;
  request.bytes = static_cast<int64_t>(vector.size() * sizeof(float));
  request.output = {std::as_writable_bytes(std::span(vector))};
  request.timeout = test::kTimeout;
  request.willWait = willWait;
  return request;
}

// The engine has no owner: the caller becomes the owner, runs its action, and gives the ownership up.
void handOverToNobody(benchmark::State& state) {
  test::runRanks({1}, [&](test::RankContext& rank) {
    int calls = 0;
    for (auto _ : state) rank.engine.progress().call([&] { ++calls; });
    benchmark::DoNotOptimize(calls);
  });
}

// From the submission of an operation until its continuation has run on the progress thread and woken this one.
void asynchronous(benchmark::State& state) {
  test::runRanks({1}, [&](test::RankContext& rank) {
    std::vector<float> vector(16);
    std::binary_semaphore ended{0};
    for (auto _ : state) {
      const auto completion = rank.engine.submit(*rank.group, allreduce(vector, false));
      completion->then([&] { ended.release(); });
      ended.acquire();
    }
  });
}

// Two threads call the engine at the same time: one is the owner, the other queues its action.
void contended(benchmark::State& state) {
  test::runRanks({1}, [&](test::RankContext& rank) {
    std::atomic<bool> stop{false};
    std::thread rival([&] {
      while (!stop.load(std::memory_order_relaxed)) rank.engine.progress().call([] {});
    });
    for (auto _ : state) rank.engine.progress().call([] {});
    stop = true;
    rival.join();
  });
}

void runAllreduce(benchmark::State& state, int ranks) {
  test::runRanks({ranks}, [&](test::RankContext& rank) {
    std::vector<float> vector(static_cast<size_t>(state.range(0)) / sizeof(float));
    if (rank.rank != 0) {
      // Only rank 0 knows the number of calls. In the last one its vector is not zero.
      do {
        vector[0] = 0;
        rank.run(allreduce(vector, true));
      } while (vector[0] == 0);
      return;
    }
    for (auto _ : state) rank.run(allreduce(vector, true));
    vector[0] = 1;
    rank.run(allreduce(vector, true));
  });
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * state.range(0));
}

BENCHMARK(handOverToNobody)->Name("hand_over/uncontended")->UseRealTime();
BENCHMARK(contended)->Name("hand_over/contended")->UseRealTime();
BENCHMARK(asynchronous)->Name("hand_over/asynchronous")->UseRealTime();

const bool kRegistered = [] {
  for (const int ranks : {2, 4}) {
    const std::string name = fmt::format("allreduce/{}_ranks", ranks);
    auto* added = benchmark::RegisterBenchmark(
        name.c_str(), [=](benchmark::State& state) { runAllreduce(state, ranks); });
    for (const int kib : {4, 16, 32, 64, 128, 256, 2048, 16384}) added->Arg(int64_t{kib} << 10);
    added->Arg(8)->UseRealTime();
  }
  return true;
}();

}  // namespace
}  // namespace smddp::engine
