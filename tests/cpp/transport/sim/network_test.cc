#include "transport/sim/network.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "common/error.h"
#include "transport/sim/sim_transport.h"
#include "transport/transport_suite.h"

namespace smddp::transport::sim {
namespace {

using testing::pattern;
using testing::RecordingSink;

// Two connected transports with their sinks.
struct Pair {
  explicit Pair(uint64_t seed, const Faults& faults = {}) : network(seed, faults) {
    ab = a->connect(b->address(), "b");
    ba = b->connect(a->address(), "a");
    memory.resize(1 << 16);
    region = b->registerMemory(memory);
  }
  bool put(uint32_t number, size_t offset, Bytes payload) {
    return a->put(ab, {region, offset}, number, header, payload, number);
  }
  void runOut() {
    while (network.advance()) pollBoth();
    pollBoth();
  }
  void pollBoth() {
    a->poll(atA);
    b->poll(atB);
  }

  SimNetwork network;
  std::unique_ptr<SimTransport> a = network.create("a"), b = network.create("b");
  PeerId ab = -1, ba = -1;
  RecordingSink atA, atB;
  std::vector<std::byte> memory;
  RemoteKey region;
  const std::vector<std::byte> header = pattern(kHeaderBytes, 1);
};

Bytes messageAt(const RecordingSink& sink, size_t i) { return sink.controls.at(i).second; }

TEST(SimNetwork, ControlStaysInOrderUnderDelaysAndOutages) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Pair p(seed);
    Random random(seed);
    for (int i = 0; i < 3; ++i) {
      const Nanoseconds from = random.between(0, 100'000);
      p.network.partition(0, 1, from, from + random.between(1, 50'000), Outage::Hold);
    }
    for (uint32_t i = 0; i < 60; ++i) {
      ASSERT_TRUE(p.a->control(p.ab, pattern(20, i)));
      if (random.chance(0.5)) p.network.advance();
    }
    p.runOut();
    ASSERT_EQ(p.atB.controls.size(), 60u);
    for (uint32_t i = 0; i < 60; ++i) {
      ASSERT_TRUE(std::ranges::equal(messageAt(p.atB, i), pattern(20, i))) << "message " << i;
    }
  }
}

TEST(SimNetwork, PutsOvertakeEachOtherOnlyWhereAskedFor) {
  const auto isOrdered = [](uint64_t seed, bool reorder) {
    Pair p(seed, {.reorder = reorder});
    std::vector<uint32_t> order;
    struct Order final : RecordingSink {
      std::vector<uint32_t> order;
      void onPut(uint32_t immediate) override { order.push_back(immediate); }
    } sink;
    const auto payload = pattern(8, 0);
    for (uint32_t i = 0; i < 20; ++i) EXPECT_TRUE(p.put(i, i * 64, payload));
    while (p.network.advance()) p.b->poll(sink);
    EXPECT_EQ(sink.order.size(), 20u);
    return std::ranges::is_sorted(sink.order);
  };
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    EXPECT_TRUE(isOrdered(seed, false)) << "seed " << seed;
    EXPECT_FALSE(isOrdered(seed, true)) << "seed " << seed;
  }
}

// The simulator must be harsh in these two ways, or bugs in credit and flush would not be seen.
TEST(SimNetwork, ATargetIsSpoiledAtOnceAndASourceIsReadLate) {
  int spoiledSources = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Pair p(seed);
    std::ranges::fill(p.memory, std::byte{0x11});
    auto payload = pattern(100, 1);
    ASSERT_TRUE(p.put(1, 0, payload));
    const size_t spoiled = kHeaderBytes + payload.size();
    EXPECT_EQ(std::count(p.memory.begin(), p.memory.begin() + spoiled, p.memory[0]), spoiled);
    EXPECT_TRUE(std::all_of(p.memory.begin() + spoiled, p.memory.end(),
                            [](std::byte b) { return b == std::byte{0x11}; }));
    std::ranges::fill(payload, std::byte{0});  // a mistake: this is before onPutDone
    p.runOut();
    spoiledSources += std::ranges::equal(std::span(p.memory).subspan(kHeaderBytes, 100), payload);
  }
  EXPECT_EQ(spoiledSources, 20);
}

TEST(SimNetwork, DuplicatesDropsAndRefusalsFollowTheirProbability) {
  const auto payload = pattern(8, 0);
  Pair doubled(1, {.duplicate = 1});
  ASSERT_TRUE(doubled.put(7, 0, payload));
  doubled.runOut();
  EXPECT_EQ(doubled.atB.puts[7], 2);
  EXPECT_EQ(doubled.atA.done[7], 2);

  Pair lossy(2, {.drop = 1});
  ASSERT_TRUE(lossy.put(7, 0, payload));
  ASSERT_TRUE(lossy.a->control(lossy.ab, payload));
  lossy.runOut();
  EXPECT_TRUE(lossy.atB.puts.empty());
  EXPECT_TRUE(lossy.atB.controls.empty());
  EXPECT_EQ(lossy.atA.done[7], 1);

  Pair full(3, {.refuse = 1});
  EXPECT_FALSE(full.put(7, 0, payload));
  EXPECT_FALSE(full.a->control(full.ab, payload));
  EXPECT_FALSE(full.network.advance());

  Pair half(4, {.refuse = 0.5});
  int accepted = 0;
  for (uint32_t i = 0; i < 200; ++i) accepted += half.a->control(half.ab, payload);
  EXPECT_GT(accepted, 60);
  EXPECT_LT(accepted, 140);
}

TEST(SimNetwork, FaultsBelongToALink) {
  Pair p(1);
  p.network.setFaults(p.a->endpoint(), p.b->endpoint(), {.drop = 1});
  ASSERT_TRUE(p.a->control(p.ab, p.header));
  ASSERT_TRUE(p.b->control(p.ba, p.header));
  p.runOut();
  EXPECT_TRUE(p.atB.controls.empty());
  EXPECT_EQ(p.atA.controls.size(), 1u);
}

TEST(SimNetwork, AnOutageHoldsOrDrops) {
  const auto payload = pattern(8, 0);
  Pair held(1);
  held.network.partition(0, 1, 0, 1'000'000, Outage::Hold);
  ASSERT_TRUE(held.put(1, 0, payload));
  ASSERT_TRUE(held.a->control(held.ab, payload));
  held.network.advanceTo(999'999);
  held.pollBoth();
  EXPECT_TRUE(held.atB.puts.empty() && held.atB.controls.empty() && held.atA.done.empty());
  held.runOut();
  EXPECT_TRUE(held.atB.puts.size() == 1 && held.atB.controls.size() == 1 &&
              held.atA.done.size() == 1);

  Pair dropped(1);
  dropped.network.partition(0, 1, 0, 1'000'000, Outage::Drop);
  ASSERT_TRUE(dropped.put(1, 0, payload));
  ASSERT_TRUE(dropped.a->control(dropped.ab, payload));
  dropped.network.advanceTo(1'000'000);
  ASSERT_TRUE(dropped.a->control(dropped.ab, pattern(9, 9)));
  dropped.runOut();
  EXPECT_TRUE(dropped.atB.puts.empty());
  ASSERT_EQ(dropped.atB.controls.size(), 1u);
  EXPECT_TRUE(std::ranges::equal(messageAt(dropped.atB, 0), pattern(9, 9)));

  Pair cut(1);
  cut.network.partition(0, 1, 0, SimNetwork::kForever, Outage::Hold);
  ASSERT_TRUE(cut.a->control(cut.ab, payload));
  cut.runOut();
  EXPECT_TRUE(cut.atB.controls.empty());
}

TEST(SimNetwork, AKilledPeerVanishesAndIsDetectedOnceOrNever) {
  for (const bool detected : {true, false}) {
    Pair p(1);
    const auto payload = pattern(8, 0);
    ASSERT_TRUE(p.put(1, 0, payload));
    ASSERT_TRUE(p.a->control(p.ab, payload));
    ASSERT_TRUE(p.b->control(p.ba, payload));
    p.network.kill(0, detected ? std::optional<Nanoseconds>(5'000'000) : std::nullopt);
    EXPECT_FALSE(p.a->control(p.ab, payload));
    p.network.advanceTo(4'999'999);
    p.pollBoth();
    EXPECT_TRUE(p.atB.failed.empty());
    p.runOut();
    EXPECT_TRUE(p.atB.puts.empty() && p.atB.controls.empty() && p.atA.controls.empty());
    EXPECT_EQ(p.atB.failed.size(), detected ? 1u : 0u);
    if (detected) {
      EXPECT_NE(p.atB.failed[p.ba].find("a was killed"), std::string::npos);
    }
  }
}

TEST(SimNetwork, KeysAndBoundsAreChecked) {
  Pair p(1);
  const auto payload = pattern(100, 0);
  const auto attempt = [&](RemoteSlot slot) {
    return p.a->put(p.ab, slot, 1, p.header, payload, 1);
  };
  const size_t last = p.memory.size() - kHeaderBytes - payload.size();
  EXPECT_TRUE(attempt({p.region, last}));
  EXPECT_THROW((void)attempt({p.region, last + 1}), Error);
  EXPECT_THROW((void)attempt({p.region, UINT64_MAX - 10}), Error);
  EXPECT_THROW((void)attempt({{p.region.address, p.region.key + 1}, 0}), Error);
  EXPECT_THROW((void)attempt({{p.region.address + 1, p.region.key}, 0}), Error);
}

TEST(SimNetwork, TheClockGoesFromEventToEvent) {
  SimNetwork network(1);
  std::vector<int> order;
  network.at(20, [&] { order.push_back(2); });
  network.at(10, [&] { order.push_back(1); });
  network.at(20, [&] { order.push_back(3); });
  EXPECT_EQ(network.clock().now(), 0);
  EXPECT_TRUE(network.advance());
  EXPECT_EQ(network.clock().now(), 10);
  network.advanceTo(50);
  EXPECT_EQ(network.clock().now(), 50);
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  EXPECT_FALSE(network.advance());
}

}  // namespace
}  // namespace smddp::transport::sim

namespace smddp::transport::testing {
namespace {

class SimFixture final : public Fixture {
 public:
  SimFixture(uint64_t seed, const sim::Faults& faults, int count)
      : network_(seed, faults), memory_(static_cast<size_t>(count)) {
    for (int i = 0; i < count; ++i) transports_.push_back(network_.create(fmt::format("t{}", i)));
  }
  Transport& transport(int index) override { return *transports_.at(static_cast<size_t>(index)); }
  std::span<std::byte> allocate(int index, size_t bytes) override {
    return memory_.at(static_cast<size_t>(index)).emplace_back(bytes);
  }
  // Free the memory together with the transport, so that a late write is an ASan error.
  void destroy(int index) override {
    transports_.at(static_cast<size_t>(index)).reset();
    memory_.at(static_cast<size_t>(index)).clear();
  }
  void advance() override { network_.advance(); }

 private:
  sim::SimNetwork network_;
  std::vector<std::deque<std::vector<std::byte>>> memory_;
  std::vector<std::unique_ptr<sim::SimTransport>> transports_;
};

Kind simKind(const std::string& name, const sim::Faults& faults) {
  return {name, [faults](int count) { return std::make_unique<SimFixture>(42, faults, count); }};
}

INSTANTIATE_TEST_SUITE_P(Sim, TransportSuite,
                         ::testing::Values(simKind("Ordered", {.reorder = false}),
                                           simKind("Reordering", {}),
                                           simKind("Refusing", {.refuse = 0.1})),
                         kindName);

}  // namespace
}  // namespace smddp::transport::testing
