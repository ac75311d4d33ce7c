// Channels over the simulated network with all faults that lose no message. For each seed every message arrives once,
// in the order of its number, with the right bytes, and no slot is overwritten too early.
#include <algorithm>
#include <deque>
#include <map>
#include <memory>

#include <gtest/gtest.h>

#include "common/error.h"
#include "support/effort.h"
#include "transport/channel_table.h"
#include "transport/sim/sim_transport.h"

namespace smddp::transport::sim {
namespace {

constexpr int kRanks = 3;

std::vector<std::byte> payloadOf(const ChannelKey& key, uint64_t number, size_t size) {
  Random random(key.group * 31 + number * 1009 +
                static_cast<uint64_t>(key.source * 8 + key.destination) * 7919 +
                key.track * 104729u + key.subchannel * 1299709u);
  std::vector<std::byte> bytes(size);
  for (auto& b : bytes) b = static_cast<std::byte>(random.next());
  return bytes;
}

// A channel in the test: its two ends, and the state by which the test checks them.
struct Stream {
  ChannelKey key;
  int64_t slotBytes = 0;
  int64_t window = 0;
  std::vector<size_t> sizes;  // of message 1, 2, …
  // Sender. A source is overwritten as soon as it is flushed.
  SendChannel* send = nullptr;
  std::deque<std::vector<std::byte>> sources;
  uint64_t scribbled = 0;
  // Receiver.
  ReceiveChannel* receive = nullptr;
  uint64_t checked = 0;
};

struct Process final : ControlSink {
  explicit Process(std::unique_ptr<SimTransport> made) : transport(std::move(made)) {}
  void onControl(PeerId, Bytes) override { ADD_FAILURE() << "nobody sent this"; }
  void onPeerFailed(PeerId peer, const std::string& cause) override {
    ADD_FAILURE() << "peer " << peer << " failed: " << cause;
  }
  std::unique_ptr<SimTransport> transport;
  std::unique_ptr<ChannelTable> table;
  std::deque<std::vector<std::byte>> memory;
  std::vector<PeerId> peerOf;
};

class World {
 public:
  explicit World(uint64_t seed) : random_(seed), network_(seed + 1, faults()) {
    for (int r = 0; r < kRanks; ++r) {
      processes_.emplace_back(network_.create(fmt::format("rank {}", r)));
    }
    for (auto& p : processes_) {
      p.table = std::make_unique<ChannelTable>(*p.transport, p);
      for (auto& q : processes_) {
        p.peerOf.push_back(p.transport->connect(q.transport->address(), q.transport->name()));
      }
    }
    if (random_.chance(0.3)) {
      const Nanoseconds from = random_.between(0, 200'000);
      network_.partition(0, 1, from, from + random_.between(1, 500'000), Outage::Hold);
    }
    for (int i = 0; i < 6; ++i) makeStream(i);
  }

  // Runs until every stream is complete, or nothing more can happen.
  void run() {
    int idle = 0;
    while (!finished() && idle < 1000) {
      bool moved = false;
      for (auto& p : processes_) moved |= p.table->poll() != 0;
      for (auto& s : streams_) moved |= step(s);
      if (::testing::Test::HasFatalFailure()) return;
      // Sometimes take several events at once, so that a poll finds more than one.
      for (int64_t n = random_.between(1, 3); n > 0; --n) moved |= network_.advance();
      // One idle round is not a hang: refused messages are tried again.
      idle = moved ? 0 : idle + 1;
    }
    ASSERT_TRUE(finished()) << report();
    for (auto& s : streams_)
      EXPECT_EQ(s.receive->arrived(), s.sizes.size()) << "a message too many";
  }

  // Closes both ends. Afterwards no message of the groups may be in flight.
  void close() {
    for (auto& p : processes_) {
      for (const uint64_t group : {1, 2}) p.table->closeGroup(group);
    }
    // A poll without events may still have sent refused messages. So wait for two idle polls in a row.
    for (int idle = 0; idle < 2;) {
      bool moved = network_.advance();
      for (auto& p : processes_) moved |= p.table->poll() != 0 || p.table->hasBacklog();
      idle = moved ? 0 : idle + 1;
    }
    for (auto& p : processes_) {
      for (const uint64_t group : {1, 2}) {
        for (const PeerId peer : p.peerOf) EXPECT_TRUE(p.table->drained(group, peer));
      }
    }
  }

  uint64_t digest() const { return network_.digest(); }

 private:
  Faults faults() {
    Faults f;
    f.minDelay = random_.between(0, 1000);
    f.maxDelay = f.minDelay + random_.between(0, 50'000);
    f.reorder = random_.chance(0.8);
    if (random_.chance(0.5)) f.duplicate = 0.3;
    if (random_.chance(0.5)) f.refuse = 0.4;
    return f;
  }

  void makeStream(int i) {
    Stream s;
    s.key.group = static_cast<uint64_t>(1 + i % 2);
    s.key.track = static_cast<uint8_t>(i / 4);
    s.key.subchannel = static_cast<uint8_t>(i);
    s.key.source = static_cast<Rank>(random_.between(0, kRanks - 1));
    s.key.destination = (s.key.source + static_cast<Rank>(random_.between(1, kRanks - 1))) % kRanks;
    s.slotBytes = random_.between(1, 300);
    s.window = random_.between(1, 9);
    s.sizes.resize(static_cast<size_t>(random_.between(0, 60)));
    for (auto& size : s.sizes) size = static_cast<size_t>(random_.between(0, s.slotBytes));
    streams_.push_back(std::move(s));
  }

  bool step(Stream& s) {
    // The ends are made in any order, so an Open may arrive before its sender is made.
    bool moved = false;
    if (s.send == nullptr && random_.chance(0.2)) {
      Process& p = processes_[static_cast<size_t>(s.key.source)];
      s.send = &p.table->send(s.key, p.peerOf[static_cast<size_t>(s.key.destination)]);
      moved = true;
    }
    if (s.receive == nullptr && random_.chance(0.2)) moved = openReceiver(s);
    if (s.send != nullptr) moved |= stepSender(s);
    if (s.receive != nullptr) moved |= stepReceiver(s);
    return moved;
  }

  bool openReceiver(Stream& s) {
    Process& p = processes_[static_cast<size_t>(s.key.destination)];
    auto& memory = p.memory.emplace_back(s.window * slotStride(s.slotBytes));
    const RemoteKey region = p.transport->registerMemory(memory);
    s.receive = &p.table->receive(s.key, p.peerOf[static_cast<size_t>(s.key.source)], memory,
                                  region, s.slotBytes, s.window);
    return true;
  }

  bool stepSender(Stream& s) {
    bool moved = false;
    for (; s.scribbled < s.send->flushed(); ++s.scribbled, moved = true) {
      std::ranges::fill(s.sources[s.scribbled], std::byte{0xEE});
    }
    while (s.send->sent() < s.sizes.size()) {
      const uint64_t number = s.send->sent() + 1;
      if (s.sources.size() < number) {
        s.sources.push_back(payloadOf(s.key, number, s.sizes[number - 1]));
      }
      const CallFingerprint call{1, 2, 3, 4, s.key.source, number};
      if (!s.send->put(number, s.sources[number - 1], call)) break;
      moved = true;
      const uint64_t released = s.receive == nullptr ? 0 : s.receive->released();
      EXPECT_LE(number, released + static_cast<uint64_t>(s.window))
          << "no credit: " << toString(s.key);
    }
    return moved;
  }

  bool stepReceiver(Stream& s) {
    bool moved = false;
    for (; s.checked < s.receive->arrived(); ++s.checked, moved = true) check(s, s.checked + 1);
    // Messages stay in their slots for a while. They must be unchanged when they are released.
    if (s.receive->released() < s.checked && random_.chance(0.3)) {
      const auto count = static_cast<uint64_t>(random_.between(
          static_cast<int64_t>(s.receive->released()) + 1, static_cast<int64_t>(s.checked)));
      for (uint64_t n = s.receive->released() + 1; n <= count; ++n) check(s, n);
      s.receive->release(count);
      moved = true;
    }
    // Progress must not need sendGrantsNow(), and an early grant must do no harm.
    if (random_.chance(0.02))
      processes_[static_cast<size_t>(s.key.destination)].table->sendGrantsNow();
    return moved;
  }

  void check(const Stream& s, uint64_t number) {
    ASSERT_LE(number, s.sizes.size()) << toString(s.key);
    const PutHeader& header = s.receive->header(number);
    ASSERT_EQ(header.length, s.sizes[number - 1]) << toString(s.key) << " message " << number;
    ASSERT_EQ(header.call, (CallFingerprint{1, 2, 3, 4, s.key.source, number}));
    const auto payload = s.receive->payload(number);
    ASSERT_TRUE(std::ranges::equal(payload, payloadOf(s.key, number, header.length)))
        << toString(s.key) << " message " << number << " has wrong bytes";
  }

  bool finished() const {
    return std::ranges::all_of(streams_, [](const Stream& s) {
      return s.send != nullptr && s.receive != nullptr && s.receive->released() == s.sizes.size() &&
             s.send->flushed() == s.sizes.size();
    });
  }

  std::string report() const {
    std::string text = "nothing moves any more:\n";
    for (const Stream& s : streams_) {
      text += fmt::format("{}: sent {} flushed {} arrived {} released {} of {}, window {}\n",
                          toString(s.key), s.send ? s.send->sent() : 0,
                          s.send ? s.send->flushed() : 0, s.receive ? s.receive->arrived() : 0,
                          s.receive ? s.receive->released() : 0, s.sizes.size(), s.window);
    }
    return text;
  }

  Random random_;
  SimNetwork network_;
  std::deque<Process> processes_;
  std::deque<Stream> streams_;
};

TEST(ChannelFaults, EveryMessageOnceInOrderWithTheRightBytes) {
  const test::Share share = test::shareUnderSanitizers();
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    if (!share.has(seed)) continue;
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world(seed);
    world.run();
    world.close();
    if (HasFailure()) return;
  }
}

TEST(ChannelFaults, ASeedGivesTheSameRunByteForByte) {
  std::vector<uint64_t> digests;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World first(seed), second(seed);
    first.run();
    second.run();
    EXPECT_EQ(first.digest(), second.digest());
    digests.push_back(first.digest());
  }
  std::ranges::sort(digests);
  EXPECT_EQ(std::ranges::adjacent_find(digests), digests.end()) << "the seed is not used";
}

// Message numbers exceed 16 bits, so the low bits in the immediate value wrap around.
TEST(ChannelFaults, ALongStreamOutlivesTheImmediate) {
  SimNetwork network(5);
  Process a(network.create("a")), b(network.create("b"));
  a.table = std::make_unique<ChannelTable>(*a.transport, a);
  b.table = std::make_unique<ChannelTable>(*b.transport, b);
  const PeerId toB = a.transport->connect(b.transport->address(), "b");
  const PeerId toA = b.transport->connect(a.transport->address(), "a");
  constexpr int64_t kWindow = 16;
  std::vector<std::byte> memory(kWindow * slotStride(8));
  const ChannelKey key{1, 0, 0, 0, 1};
  SendChannel& send = a.table->send(key, toB);
  ReceiveChannel& receive =
      b.table->receive(key, toA, memory, b.transport->registerMemory(memory), 8, kWindow);
  constexpr uint64_t kMessages = 140'000;
  std::vector<uint64_t> numbers(kMessages + 1);
  bool more = true;
  while (receive.released() < kMessages) {
    ASSERT_TRUE(more) << "stuck after " << receive.released();
    a.table->poll();
    b.table->poll();
    while (send.sent() < kMessages) {
      const uint64_t n = send.sent() + 1;
      numbers[n] = n * n;
      if (!send.put(n, std::as_bytes(std::span(&numbers[n], 1)), {})) break;
    }
    for (uint64_t n = receive.released() + 1; n <= receive.arrived(); ++n) {
      uint64_t value = 0;
      std::ranges::copy(receive.payload(n), std::as_writable_bytes(std::span(&value, 1)).begin());
      ASSERT_EQ(value, n * n);
    }
    receive.release(receive.arrived());
    more = network.advance();
  }
}

}  // namespace
}  // namespace smddp::transport::sim
