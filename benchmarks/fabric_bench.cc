// A stream of puts through Transport, compared with the same stream of bare fi_writedata calls.
//
//   cmake --build <folder> --target fabric_bench && <folder>/benchmarks/fabric_bench
//
// Both open the same provider over loopback, and have as many messages in flight as a channel's window has slots. They
// take turns in blocks of a few milliseconds, so that changes of the machine's speed affect both alike. The counters
// are medians over the blocks. Sender and receiver are threads that spin, each with its own endpoint and its own core.
// With fewer than two idle cores the figures mean nothing.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>

#include "common/error.h"
#include "transport/fabric/discovery.h"
#include "transport/fabric/fabric.h"
#include "transport/fabric/fid.h"
#include "transport/fabric/memory.h"

namespace smddp::transport::fabric {
namespace {

constexpr uint64_t kWindow = 4;
constexpr auto kBlock = std::chrono::milliseconds(20);

// Pins this thread to a core, numbered among those that this process may use. It stays pinned: the threads end with
// the benchmark.
void pinToCore(int number) {
  cpu_set_t allowed, one;
  CPU_ZERO(&one);
  sched_getaffinity(0, sizeof allowed, &allowed);
  static const cpu_set_t all = allowed;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &all) || number-- > 0) continue;
    CPU_SET(core, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
    return;
  }
}

Options loopback() {
  Options options;
  options.provider = "tcp";
  options.masterAddress = "127.0.0.1";
  return options;
}

// Messages from one endpoint to another. The sender's thread calls the first two functions, the receiver's the third.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void send(uint64_t number) = 0;
  virtual uint64_t pollSender() = 0;    // returns the number of messages whose source may be reused
  virtual uint64_t pollReceiver() = 0;  // returns the number of messages that have arrived
};

// A stream through Transport.
class PutStream final : public Stream {
 public:
  explicit PutStream(size_t bytes)
      : stride_((bytes + kHeaderBytes + 63) / 64 * 64),
        payload_(bytes),
        window_(kWindow * stride_) {
    sender_ = create(loopback());
    receiver_ = create(loopback());
    key_ = receiver_->registerMemory(window_);
    peer_ = sender_->connect(receiver_->address(), "the receiver");
    receiver_->connect(sender_->address(), "the sender");
  }
  void send(uint64_t number) override {
    const RemoteSlot slot{key_, number % kWindow * stride_};
    while (!sender_->put(peer_, slot, 0, header_, payload_, number)) sender_->poll(sent_);
  }
  uint64_t pollSender() override {
    sender_->poll(sent_);
    return sent_.done;
  }
  uint64_t pollReceiver() override {
    receiver_->poll(received_);
    return received_.arrived;
  }

 private:
  struct Counting final : Sink {
    void onControl(PeerId, Bytes) override {}
    void onPut(uint32_t) override { ++arrived; }
    void onPutDone(uint64_t) override { ++done; }
    void onPeerFailed(PeerId, const std::string& cause) override {
      raise(ErrorKind::Transport, "{}", cause);
    }
    uint64_t arrived = 0, done = 0;
  };
  const size_t stride_;
  std::vector<std::byte> payload_, window_, header_ = std::vector<std::byte>(kHeaderBytes);
  Counting sent_, received_;
  std::unique_ptr<Transport> sender_, receiver_;
  RemoteKey key_;
  PeerId peer_ = 0;
};

// A minimal endpoint for one stream: its completion queue has no wait object, and it posts no receives.
struct RawEndpoint {
  explicit RawEndpoint(const fi_info& raw) : info(library().dupInfo(&raw)) {
    fabric = createFabric(*info);
    domain = createDomain(*fabric, *info);
    addresses = createAddressVector(*domain);
    queue = tryCreateCompletionQueue(*domain, 0, FI_WAIT_NONE);
    endpoint = createEndpoint(*domain, *info);
    check(fi_ep_bind(endpoint.get(), &addresses->fid, 0), "fi_ep_bind");
    check(fi_ep_bind(endpoint.get(), &queue->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
    check(fi_enable(endpoint.get()), "fi_enable");
    registry =
        std::make_unique<Registry>(*domain, endpoint.get(), info->domain_attr->mr_mode, true);
  }
  fi_addr_t introduce(const RawEndpoint& other) {
    std::array<std::byte, 512> name;
    size_t length = name.size();
    check(fi_getname(&other.endpoint->fid, name.data(), &length), "fi_getname");
    fi_addr_t address = FI_ADDR_UNSPEC;
    check(fi_av_insert(addresses.get(), name.data(), 1, &address, 0, nullptr), "fi_av_insert");
    return address;
  }
  uint64_t poll() {
    std::array<fi_cq_data_entry, 16> entries;
    const ssize_t count = fi_cq_read(queue.get(), entries.data(), entries.size());
    if (count == -FI_EAGAIN) return completed;
    check(count, "fi_cq_read");
    return completed += static_cast<uint64_t>(count);
  }
  InfoPtr info;
  Fabric fabric;
  Domain domain;
  std::unique_ptr<Registry> registry;
  AddressVector addresses;
  CompletionQueue queue;
  EndpointFid endpoint;
  uint64_t completed = 0;
};

class RawStream final : public Stream {
 public:
  explicit RawStream(size_t bytes) : payload_(bytes), window_(kWindow * bytes) {
    const Discovery found = discover();
    const Choice choice = choose(found.offered, loopback(), routeTo("127.0.0.1"));
    sender_ = std::make_unique<RawEndpoint>(*found.raw[choice.index]);
    receiver_ = std::make_unique<RawEndpoint>(*found.raw[choice.index]);
    key_ = receiver_->registry->add(window_);
    sender_->registry->addLocal(payload_);
    descriptor_ = sender_->registry->descriptorOf(payload_).value();
    to_ = sender_->introduce(*receiver_);
    receiver_->introduce(*sender_);
  }
  void send(uint64_t number) override {
    const uint64_t slot = number % kWindow;
    ssize_t result = -FI_EAGAIN;
    while (result == -FI_EAGAIN) {
      result =
          fi_writedata(sender_->endpoint.get(), payload_.data(), payload_.size(), descriptor_, 0,
                       to_, key_.address + slot * payload_.size(), key_.key, &contexts_[slot]);
      if (result == -FI_EAGAIN) sender_->poll();
    }
    check(result, "fi_writedata");
  }
  uint64_t pollSender() override { return sender_->poll(); }
  uint64_t pollReceiver() override { return receiver_->poll(); }

 private:
  std::vector<std::byte> payload_, window_;
  std::array<fi_context2, kWindow> contexts_{};
  std::unique_ptr<RawEndpoint> sender_, receiver_;
  RemoteKey key_;
  fi_addr_t to_ = FI_ADDR_UNSPEC;
  void* descriptor_ = nullptr;
};

// A stream and its figures. Another thread calls receive() while block() runs.
struct Contestant {
  explicit Contestant(std::unique_ptr<Stream> opened) : stream(std::move(opened)) {}

  // Sends for kBlock. Returns microseconds per message.
  double block() {
    const auto begin = std::chrono::steady_clock::now();
    const uint64_t first = number;
    do {
      for (int i = 0; i < 16; ++i) {
        while (number - arrived.load(std::memory_order_acquire) >= kWindow ||
               number - done >= kWindow)
          done = stream->pollSender();
        stream->send(number++);
      }
    } while (std::chrono::steady_clock::now() - begin < kBlock);
    while (arrived.load(std::memory_order_acquire) < number || done < number)
      done = stream->pollSender();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    return took.count() / static_cast<double>(number - first);
  }
  void receive() { arrived.store(stream->pollReceiver(), std::memory_order_release); }

  std::unique_ptr<Stream> stream;
  uint64_t number = 0, done = 0;
  alignas(64) std::atomic<uint64_t> arrived{0};
  std::vector<double> times{};
};

double medianOf(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void putBesideRaw(benchmark::State& state) {
  const auto bytes = static_cast<size_t>(state.range(0));
  Contestant put(std::make_unique<PutStream>(bytes)), raw(std::make_unique<RawStream>(bytes));
  std::atomic<Contestant*> current{&put};
  std::thread receiver([&] {
    pinToCore(1);
    while (Contestant* const now = current.load(std::memory_order_acquire)) now->receive();
  });
  pinToCore(0);
  std::vector<double> ratios;
  const auto turn = [&](Contestant& whose) {
    current.store(&whose, std::memory_order_release);
    return whose.block();
  };
  for (Contestant* const each : {&put, &raw}) turn(*each);  // connects, and warms the caches
  for (auto _ : state) {
    for (Contestant* const each : {&put, &raw}) each->times.push_back(turn(*each));
    state.SetIterationTime(put.times.back() * 1e-6);
    ratios.push_back(put.times.back() / raw.times.back());
  }
  current = nullptr;
  receiver.join();
  state.counters["put_us"] = medianOf(put.times);
  state.counters["raw_us"] = medianOf(raw.times);
  state.counters["put/raw"] = medianOf(ratios);
}

BENCHMARK(putBesideRaw)
    ->Name("tcp/put_stream_beside_fi_writedata")
    ->Arg(4096)
    ->Arg(65536)
    ->Arg(1 << 20)
    ->Iterations(100)
    ->UseManualTime();

}  // namespace
}  // namespace smddp::transport::fabric
