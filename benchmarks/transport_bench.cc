// Shared memory and libfabric under the channels: round trips, and streams of puts.
//
//   cmake --build <folder> --target transport_bench && <folder>/benchmarks/transport_bench
//
// Two transports of one process, each polled by a thread that spins, so that the scheduler is not measured. With fewer
// than two idle cores the figures mean nothing.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>

#include "common/error.h"
#include "transport/fabric/fabric.h"
#include "transport/shm/shm_transport.h"
#include "transport/shm/slab.h"

namespace smddp::transport {
namespace {

constexpr uint64_t kWindow = 4;

// Counts what arrives.
class CountingSink final : public Sink {
 public:
  void onControl(PeerId, Bytes) override { ++arrived; }
  void onPut(uint32_t) override { ++arrived; }
  void onPutDone(uint64_t) override { ++done; }
  void onPeerFailed(PeerId, const std::string& cause) override {
    raise(ErrorKind::Transport, "{}", cause);
  }
  uint64_t arrived = 0, done = 0;
};

// One side: a transport, its registered window, and the other side's.
struct Side {
  std::shared_ptr<shm::Slab> slab;  // shared memory only
  std::vector<std::byte> heap;      // libfabric only; outlives the transport
  std::unique_ptr<Transport> transport;
  RemoteKey window;
  PeerId peer = 0;
  RemoteKey peerWindow;
  CountingSink sink;
  std::vector<std::byte> payload;
  std::vector<std::byte> header = std::vector<std::byte>(kHeaderBytes);

  void poll() { transport->poll(sink); }
  void put(uint64_t slot, size_t stride) {
    const RemoteSlot to{peerWindow, slot % kWindow * stride};
    while (!transport->put(peer, to, 0, header, payload, slot)) poll();
  }
};

// provider: empty for shared memory.
void open(Side& side, const std::string& provider, size_t windowBytes, size_t payload) {
  side.payload.resize(payload);
  std::span<std::byte> memory;
  if (provider.empty()) {
    side.slab = shm::Slab::create();
    side.transport = std::make_unique<shm::ShmTransport>(side.slab);
    memory = side.slab->allocate(windowBytes);
    side.slab->commit(memory);
  } else {
    fabric::Options options;
    options.provider = provider;
    options.masterAddress = "127.0.0.1";
    side.heap.resize(windowBytes);
    side.transport = fabric::create(options);
    memory = side.heap;
  }
  side.window = side.transport->registerMemory(memory);
}

struct Pair {
  Pair(const std::string& provider, size_t payload)
      : stride((payload + kHeaderBytes + 63) / 64 * 64) {
    for (Side* side : {&a, &b}) open(*side, provider, kWindow * stride, payload);
    a.peer = a.transport->connect(b.transport->address(), "b");
    b.peer = b.transport->connect(a.transport->address(), "a");
    a.peerWindow = b.window;
    b.peerWindow = a.window;
  }
  const size_t stride;
  Side a, b;
};

// Sends a message and waits for one from the other side.
void roundTrip(benchmark::State& state, const std::string& provider, bool control) {
  Pair pair(provider, static_cast<size_t>(state.range(0)));
  const auto send = [&](Side& side, uint64_t number) {
    if (!control) return side.put(number, pair.stride);
    while (!side.transport->control(side.peer, side.payload)) side.poll();
  };
  std::atomic<bool> stop{false};
  std::thread echo([&] {
    for (uint64_t seen = 0; !stop.load(std::memory_order_relaxed);) {
      pair.b.poll();
      while (seen < pair.b.sink.arrived) send(pair.b, seen++);
    }
  });
  uint64_t number = 0;
  for (auto _ : state) {
    send(pair.a, number++);
    while (pair.a.sink.arrived < number) pair.a.poll();
  }
  stop = true;
  echo.join();
}

// Sends puts, with as many in flight as a channel's window has slots.
void stream(benchmark::State& state, const std::string& provider) {
  const auto bytes = static_cast<size_t>(state.range(0));
  Pair pair(provider, bytes);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> arrived{0};
  std::thread receiver([&] {
    while (!stop.load(std::memory_order_relaxed)) {
      pair.b.poll();
      arrived.store(pair.b.sink.arrived, std::memory_order_release);
    }
  });
  uint64_t number = 0;
  for (auto _ : state) {
    while (number - arrived.load(std::memory_order_acquire) >= kWindow ||
           number - pair.a.sink.done >= kWindow) {
      pair.a.poll();
    }
    pair.a.put(number++, pair.stride);
  }
  while (arrived.load() < number || pair.a.sink.done < number) pair.a.poll();
  stop = true;
  receiver.join();
  state.SetBytesProcessed(static_cast<int64_t>(number * bytes));
}

const bool kRegistered = [] {
  for (const char* provider : {"", "tcp"}) {
    const std::string name = *provider == '\0' ? "shm" : provider;
    if (name != "shm" && !fabric::available(nullptr)) continue;
    const auto add = [&](const std::string& what, auto body, std::vector<int64_t> sizes) {
      auto* added = benchmark::RegisterBenchmark((name + "/" + what).c_str(), body);
      for (const int64_t size : sizes) added->Arg(size);
      added->UseRealTime();
    };
    const std::string which = provider;
    add("control_round_trip", [which](auto& state) { roundTrip(state, which, true); }, {8, 512});
    add("put_round_trip", [which](auto& state) { roundTrip(state, which, false); }, {8, 4096});
    add("put_stream", [which](auto& state) { stream(state, which); }, {4096, 65536, 1 << 20});
  }
  return true;
}();

}  // namespace
}  // namespace smddp::transport
