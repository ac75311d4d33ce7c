#include "transport/shm/shm_transport.h"

#include <cstring>
#include <random>
#include <thread>

#include "common/error.h"
#include "transport/shm/child.h"
#include "transport/shm/doorbell.h"
#include "transport/shm/liveness.h"
#include "transport/transport_suite.h"

namespace smddp::transport::shm {
namespace {

using smddp::transport::testing::Fixture;
using smddp::transport::testing::Kind;
using smddp::transport::testing::pattern;
using smddp::transport::testing::RecordingSink;
using testing::Child;
using testing::eventually;
using testing::kSecond;

class ShmFixture : public Fixture {
 public:
  explicit ShmFixture(int count) {
    for (int i = 0; i < count; ++i) {
      slabs_.push_back(Slab::create());
      transports_.push_back(std::make_unique<ShmTransport>(slabs_.back()));
    }
  }
  Transport& transport(int index) override { return *transports_.at(index); }
  std::span<std::byte> allocate(int index, size_t bytes) override {
    return slabs_.at(index)->allocate(bytes);
  }
  void destroy(int index) override { transports_.at(index).reset(); }

 private:
  std::vector<std::shared_ptr<Slab>> slabs_;
  std::vector<std::unique_ptr<ShmTransport>> transports_;
};

Kind shmKind() {
  return {"shm", [](int count) { return std::make_unique<ShmFixture>(count); }};
}

}  // namespace
}  // namespace smddp::transport::shm

namespace smddp::transport::testing {
INSTANTIATE_TEST_SUITE_P(Shm, TransportSuite, ::testing::Values(shm::shmKind()), kindName);
}  // namespace smddp::transport::testing

namespace smddp::transport::shm {
namespace {

// An address in a form that can be sent through a pipe.
struct Published {
  std::array<std::byte, 512> bytes{};
  size_t size = 0;
  Bytes view() const { return {bytes.data(), size}; }
};

Published publish(const Transport& transport) {
  const auto address = transport.address();
  Published result;
  std::copy(address.begin(), address.end(), result.bytes.begin());
  result.size = address.size();
  return result;
}

Bytes asBytes(const uint32_t& value) { return std::as_bytes(std::span(&value, 1)); }

// Sends `count` numbered puts and control messages of random sizes, and checks as many of the
// peer's. Puts go to slots of kSlot bytes; the peer's control messages say how many it has consumed.
class Exchange : public Sink {
 public:
  static constexpr uint32_t kCount = 3000;
  static constexpr uint32_t kWindow = 8;
  static constexpr size_t kSlot = 32 * 1024;

  Exchange(std::shared_ptr<Slab> slab, uint32_t seed)
      : slab_(slab), transport_(slab), random_(seed) {
    memory_ = slab->allocate(kWindow * kSlot);
    region_ = transport_.registerMemory(memory_);
  }

  ShmTransport& transport() { return transport_; }
  RemoteKey region() const { return region_; }

  // Returns an empty text if all went well.
  std::string run(Bytes address, const RemoteKey& theirs) {
    peer_ = transport_.connect(address, "the other side");
    Doorbell doorbell(slab_);
    const MonotonicClock clock;
    const Deadline deadline = Deadline::after(clock, 60 * kSecond);
    while (trouble_.empty() && (received_ < kCount || granted_ < kCount || done_ < kCount)) {
      if (step(theirs) != 0) continue;
      if (deadline.passed(clock)) trouble_ = "timed out";
      // Sleep, to prove that every record wakes us, and so does new room in a ring.
      doorbell.prepare();
      step(theirs) != 0 ? doorbell.cancel() : doorbell.sleep(10 * kSecond);
    }
    return trouble_;
  }

 private:
  size_t step(const RemoteKey& theirs) {
    size_t progress = transport_.poll(*this);
    if (consumed_ < received_ && transport_.control(peer_, asBytes(received_))) {
      consumed_ = received_;
      ++progress;
    }
    while (sent_ < kCount && sent_ < granted_ + kWindow) {
      if (payload_.empty()) payload_ = pattern(1 + random_() % (kSlot - kHeaderBytes), sent_);
      const auto header = headerOf(payload_.size());
      const RemoteSlot slot{theirs, sent_ % kWindow * kSlot};
      if (!transport_.put(peer_, slot, sent_, header, payload_, sent_)) break;
      ++sent_;
      ++progress;
      payload_.clear();
    }
    return progress;
  }

  static std::vector<std::byte> headerOf(size_t size) {
    std::vector<std::byte> header(kHeaderBytes);
    std::memcpy(header.data(), &size, sizeof size);
    return header;
  }

  void onControl(PeerId, Bytes message) override {
    uint32_t value = 0;
    if (message.size() != sizeof value) trouble_ = "a control message of another size";
    std::memcpy(&value, message.data(), sizeof value);
    if (value <= granted_ || value > sent_) trouble_ = "control messages out of order";
    granted_ = value;
  }
  void onPut(uint32_t immediate) override {
    if (immediate != received_)
      trouble_ = fmt::format("put {} instead of {}", immediate, received_);
    const std::byte* slot = memory_.data() + immediate % kWindow * kSlot;
    size_t size = 0;
    std::memcpy(&size, slot, sizeof size);
    const auto wanted = pattern(std::min(size, kSlot), immediate);
    if (std::memcmp(slot + kHeaderBytes, wanted.data(), wanted.size()) != 0)
      trouble_ = "wrong bytes";
    ++received_;
  }
  void onPutDone(uint64_t token) override {
    if (token != done_) trouble_ = "puts reported done out of order";
    ++done_;
  }
  void onPeerFailed(PeerId, const std::string& cause) override {
    // The other side may have finished and left already.
    if (received_ < kCount || granted_ < kCount) trouble_ = "peer failed: " + cause;
  }

  std::shared_ptr<Slab> slab_;
  ShmTransport transport_;
  std::mt19937 random_;
  std::span<std::byte> memory_;
  RemoteKey region_;
  PeerId peer_ = -1;
  std::vector<std::byte> payload_;
  std::string trouble_;
  uint32_t sent_ = 0, done_ = 0, granted_ = 0, received_ = 0, consumed_ = 0;
};

TEST(ShmTransport, ProcessesExchangeWithoutPolling) {
  Child child([](const Child::Line& line) {
    Exchange exchange(Slab::create(), 1);
    line.send(publish(exchange.transport()));
    line.send(exchange.region());
    const auto address = line.receive<Published>();
    const std::string trouble = exchange.run(address.view(), line.receive<RemoteKey>());
    if (!trouble.empty()) fprintf(stderr, "child: %s\n", trouble.c_str());
    return trouble.empty() ? 0 : 1;
  });
  Exchange exchange(Slab::create(), 2);
  const auto address = child.receive<Published>();
  const auto theirs = child.receive<RemoteKey>();
  child.send(publish(exchange.transport()));
  child.send(exchange.region());
  EXPECT_EQ(exchange.run(address.view(), theirs), "");
  EXPECT_EQ(child.wait(), 0);
}

TEST(ShmTransport, ThreadsExchangeWithoutPolling) {
  Exchange sides[2] = {{Slab::create(), 3}, {Slab::create(), 4}};
  const Published addresses[2] = {publish(sides[0].transport()), publish(sides[1].transport())};
  std::string trouble[2];
  std::thread other([&] { trouble[1] = sides[1].run(addresses[0].view(), sides[0].region()); });
  trouble[0] = sides[0].run(addresses[1].view(), sides[1].region());
  other.join();
  EXPECT_EQ(trouble[0], "");
  EXPECT_EQ(trouble[1], "");
}

TEST(ShmTransport, SenderThatFoundNoRoomIsWokenWhenThereIsSome) {
  const auto slab = Slab::create(Slab::kLeastReserve);
  ShmTransport sender(slab);
  ShmTransport receiver(Slab::create(Slab::kLeastReserve));
  const PeerId to = sender.connect(publish(receiver).view(), "receiver");
  receiver.connect(publish(sender).view(), "sender");
  Doorbell doorbell(slab);
  RecordingSink sink;
  for (uint32_t round = 0; round < 3; ++round) {
    uint32_t sent = 0;
    while (sender.control(to, asBytes(sent))) ++sent;
    ASSERT_GT(sent, 100u);
    doorbell.prepare();
    ASSERT_EQ(receiver.poll(sink), sent);
    EXPECT_EQ(slab->page().sleep.load(), Sleep::Awake) << "not woken in round " << round;
    doorbell.cancel();
  }
}

TEST(ShmTransport, DeadPeerIsReportedAfterItsLastMessageAndOnce) {
  Child child([](const Child::Line& line) {
    const auto slab = Slab::create();
    const LifeLock lifeLock(slab);
    ShmTransport transport(slab);
    line.send(publish(transport));
    const PeerId peer = transport.connect(line.receive<Published>().view(), "parent");
    for (uint32_t i = 0; i < 10; ++i) {
      if (!transport.control(peer, asBytes(i))) return 1;
    }
    ::kill(getpid(), SIGKILL);
    return 0;
  });
  const auto slab = Slab::create();
  ShmTransport transport(slab);
  const auto address = child.receive<Published>();
  const PeerId peer = transport.connect(address.view(), "rank 5 on host h");
  child.send(publish(transport));
  RecordingSink sink;
  ASSERT_TRUE(eventually([&] {
    transport.poll(sink);
    return sink.failed.count(peer) == 1;
  }));
  EXPECT_EQ(sink.controls.size(), 10u) << "what it sent before it died is lost";
  EXPECT_EQ(sink.failed[peer], "its process died");
  const uint32_t value = 1;
  EXPECT_FALSE(transport.control(peer, asBytes(value)));
  sink.failed.clear();
  EXPECT_EQ(transport.poll(sink), 0u);
  EXPECT_TRUE(sink.failed.empty()) << "said twice";
}

TEST(ShmTransport, PeerThatDiedBeforeConnectIsReported) {
  Child child([](const Child::Line& line) {
    ShmTransport transport(Slab::create());
    line.send(publish(transport));
    pause();
    return 0;
  });
  const auto address = child.receive<Published>();
  child.kill(SIGKILL);
  child.wait();
  ShmTransport transport(Slab::create());
  const PeerId peer = transport.connect(address.view(), "rank 1");
  RecordingSink sink;
  transport.poll(sink);
  EXPECT_EQ(sink.failed.count(peer), 1u);
}

TEST(ShmTransport, SuccessorOnTheSameSlabIsAnotherPeer) {
  const auto slabA = Slab::create();
  const auto slabB = Slab::create();
  ShmTransport a(slabA);
  for (uint32_t round = 0; round < 600; ++round) {  // more rounds than there are rings
    auto b = std::make_unique<ShmTransport>(slabB);
    const PeerId bAtA = a.connect(publish(*b).view(), "b");
    const PeerId aAtB = b->connect(publish(a).view(), "a");
    RecordingSink sinkA, sinkB;
    ASSERT_TRUE(b->control(aAtB, asBytes(round)));
    ASSERT_TRUE(a.control(bAtA, asBytes(round)));
    b->poll(sinkB);
    ASSERT_EQ(sinkB.controls.size(), 1u) << "round " << round;
    b.reset();
    a.poll(sinkA);
    ASSERT_EQ(sinkA.controls.size(), 1u) << "round " << round;
    ASSERT_EQ(sinkA.controls[0].first, bAtA);
    ASSERT_EQ(sinkA.failed.size(), 1u);
    ASSERT_EQ(sinkA.failed.count(bAtA), 1u);
    ASSERT_TRUE(sinkB.failed.empty());
  }
}

TEST(ShmTransport, ARingOfADeadPeerIsUsedAgain) {
  ShmTransport a(Slab::create());
  std::vector<std::unique_ptr<ShmTransport>> dead;
  for (uint32_t round = 0; round < 300; ++round) {  // more rounds than there are rings
    const auto slab = Slab::create(Slab::kLeastReserve);
    dead.push_back(std::make_unique<ShmTransport>(slab));
    ShmTransport& b = *dead.back();
    const PeerId bAtA = a.connect(publish(b).view(), "b");
    ASSERT_TRUE(b.control(b.connect(publish(a).view(), "a"), asBytes(round))) << "round " << round;
    slab->page().life.store(Life::Died);
    RecordingSink sink;
    a.poll(sink);
    ASSERT_EQ(sink.controls.size(), 1u) << "round " << round;
    ASSERT_EQ(sink.failed.count(bAtA), 1u);
  }
}

TEST(ShmTransport, RefusesASlotOutsideTheGrantedMemory) {
  const auto slab = Slab::create(Slab::kLeastReserve);
  const auto header = pattern(kHeaderBytes, 1);
  const auto payload = pattern(1000, 2);
  const uint64_t size = slab->size();
  const std::pair<RemoteKey, uint64_t> cases[] = {
      {{0, size}, 0},            // the control page
      {{size - 1000, 4096}, 0},  // beyond the slab
      {{size + 4096, 4096}, 0},
      {{~uint64_t{0} - 100, 4096}, 0},
      {{size / 2, ~uint64_t{0}}, 0},
      {{size / 2, 1000}, 0},  // header and payload do not fit
      {{size / 2, 4096}, 4096 - kHeaderBytes - 999},
      {{size / 2, 4096}, ~uint64_t{0} - 10},
  };
  for (const auto& [region, offset] : cases) {
    ShmTransport target(slab);
    ShmTransport source(Slab::create(Slab::kLeastReserve));
    const PeerId peer = source.connect(publish(target).view(), "rank 7");
    EXPECT_FALSE(source.put(peer, {region, offset}, 0, header, payload, 0));
    RecordingSink sink;
    source.poll(sink);
    ASSERT_EQ(sink.failed.count(peer), 1u);
    EXPECT_NE(sink.failed[peer].find("it granted a slot"), std::string::npos) << sink.failed[peer];
    EXPECT_TRUE(sink.done.empty());
  }
  EXPECT_EQ(slab->page().magic, ProcessPage::kMagic);
}

TEST(ShmTransport, RefusesMemoryOutsideTheSlab) {
  ShmTransport transport(Slab::create(Slab::kLeastReserve));
  std::array<std::byte, 64> local{};
  EXPECT_THROW(transport.registerMemory(local), Error);
}

// Whatever a mate writes into its ring, we do not crash and do not read beyond the ring.
TEST(ShmTransport, SurvivesGarbageInARing) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto slab = Slab::create(Slab::kLeastReserve);
    ShmTransport victim(slab);
    ShmTransport vandal(Slab::create(Slab::kLeastReserve));
    const PeerId vandalAtVictim = victim.connect(publish(vandal).view(), "vandal");
    const PeerId victimAtVandal = vandal.connect(publish(victim).view(), "victim");
    RecordingSink sink;
    ASSERT_TRUE(vandal.control(victimAtVandal, asBytes(seed)));
    victim.poll(sink);
    ASSERT_EQ(sink.controls.size(), 1u);
    auto& table = *reinterpret_cast<RingTable*>(slab->data() + slab->page().ringsOffset);
    Ring& ring = table.rings[0];
    ASSERT_EQ(table.claim(ring).state.load(), RingState::Open);
    for (std::byte& b : ring.data) b = static_cast<std::byte>(random() % 3 == 0 ? random() : 0);
    const bool absurd = random() % 4 == 0;
    ring.head.store(absurd ? random() * uint64_t{random()} : ring.head + random() % Ring::kBytes);
    for (int i = 0; i < 10; ++i) victim.poll(sink);
    EXPECT_EQ(sink.failed.count(vandalAtVictim), 1u);
  }
}

}  // namespace
}  // namespace smddp::transport::shm
