// Several cards as one transport: the suite of all transports, over simulated cards, and tests of its own.
#include "transport/striped_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "common/error.h"
#include "transport/sim/sim_transport.h"
#include "transport/transport_suite.h"

namespace smddp::transport::testing {
namespace {

using sim::SimNetwork;
using ::testing::HasSubstr;

std::unique_ptr<Transport> striped(SimNetwork& network, int numCards) {
  std::vector<std::unique_ptr<Transport>> cards;
  for (int i = 0; i < numCards; ++i) cards.push_back(network.create(fmt::format("card {}", i)));
  return std::make_unique<StripedTransport>(std::move(cards));
}

class StripedFixture final : public Fixture {
 public:
  // numCards[i] is the number of cards of transport i.
  StripedFixture(const sim::Faults& faults, const std::vector<int>& numCards, int count)
      : network_(42, faults), memory_(static_cast<size_t>(count)) {
    for (int i = 0; i < count; ++i) {
      transports_.push_back(striped(network_, numCards[static_cast<size_t>(i)]));
    }
  }
  Transport& transport(int index) override { return *transports_.at(static_cast<size_t>(index)); }
  std::span<std::byte> allocate(int index, size_t bytes) override {
    return memory_.at(static_cast<size_t>(index)).emplace_back(bytes);
  }
  void destroy(int index) override {
    transports_.at(static_cast<size_t>(index)).reset();
    memory_.at(static_cast<size_t>(index)).clear();
  }
  void advance() override { network_.advance(); }

 private:
  SimNetwork network_;
  std::vector<std::deque<std::vector<std::byte>>> memory_;
  std::vector<std::unique_ptr<Transport>> transports_;
};

Kind kindOf(const std::string& name, const sim::Faults& faults, const std::vector<int>& cards) {
  return {name, [=](int count) { return std::make_unique<StripedFixture>(faults, cards, count); }};
}

INSTANTIATE_TEST_SUITE_P(Striped, TransportSuite,
                         ::testing::Values(kindOf("OneCard", {}, {1, 1, 1}),
                                           kindOf("TwoCards", {}, {2, 2, 2}),
                                           kindOf("UnevenCards", {}, {2, 1, 3}),
                                           kindOf("Slow", {.maxDelay = 1'000'000}, {3, 3, 2})),
                         kindName);

// Endpoints 0 and 1 are the cards of a, 2 and 3 those of b.
class StripedTest : public ::testing::Test {
 protected:
  StripedTest() {
    toB_ = a_->connect(b_->address(), "b");
    toA_ = b_->connect(a_->address(), "a");
    region_ = b_->registerMemory(memory_);
    runOut();
  }
  void runOut() {
    while (network_.advance()) pollBoth();
    pollBoth();
  }
  void pollBoth() {
    a_->poll(atA_);
    b_->poll(atB_);
  }
  void put(uint32_t number) {
    ASSERT_TRUE(a_->put(toB_, {region_, 0}, number, header_, {}, number));
  }

  SimNetwork network_{7};
  std::vector<std::byte> memory_ = std::vector<std::byte>(4096);
  std::unique_ptr<Transport> a_ = striped(network_, 2), b_ = striped(network_, 2);
  PeerId toB_ = -1, toA_ = -1;
  RemoteKey region_;
  RecordingSink atA_, atB_;
  const std::vector<std::byte> header_ = pattern(kHeaderBytes, 1);
};

TEST_F(StripedTest, EveryCardCarriesItsPart) {
  const Nanoseconds now = network_.clock().now();
  network_.partition(1, 3, now, now + 10'000'000, sim::Outage::Hold);
  for (uint32_t i = 0; i < 10; ++i) put(i);
  network_.advanceTo(now + 5'000'000);
  pollBoth();
  EXPECT_EQ(atB_.puts.size(), 5u);
  runOut();
  EXPECT_EQ(atB_.puts.size(), 10u);
  EXPECT_EQ(atA_.done.size(), 10u);
}

TEST_F(StripedTest, ALostCardIsALostPeerAfterWhatHasArrived) {
  for (uint32_t i = 0; i < 10; ++i) put(i);
  ASSERT_TRUE(a_->control(toB_, pattern(20, 1)));
  network_.kill(1, 30'000);
  network_.advanceTo(network_.clock().now() + 1'000'000);
  b_->poll(atB_);
  EXPECT_EQ(atB_.controls.size(), 1u);
  EXPECT_TRUE(atB_.failed.empty()) << "reported before the other card was quiet";
  b_->poll(atB_);
  ASSERT_EQ(atB_.failed.count(toA_), 1u);
  EXPECT_THAT(atB_.failed[toA_], HasSubstr("was killed"));
  atB_.failed.clear();
  network_.kill(0, 0);
  runOut();
  EXPECT_TRUE(atB_.failed.empty()) << "reported twice";
}

TEST_F(StripedTest, ReportsALostCardAlsoUnderEndlessTraffic) {
  network_.kill(3, 0);
  for (uint32_t i = 0; i < 200 && atA_.failed.empty(); ++i) {
    ASSERT_TRUE(b_->control(toA_, pattern(8, i)));
    network_.advanceTo(network_.clock().now() + 100'000);
    ASSERT_GT(a_->poll(atA_), 0u);
  }
  EXPECT_EQ(atA_.failed.count(toB_), 1u);
}

// Bytes from a peer are checked.
TEST_F(StripedTest, RefusesMalformedBytes) {
  std::vector<std::byte> address = a_->address();
  for (size_t length = 0; length < address.size(); ++length) {
    if (length == address.size() / 2) continue;  // one card
    EXPECT_THROW(b_->connect(Bytes(address).first(length), "short"), Error) << length;
  }
  const auto first = network_.create("first"), second = network_.create("second");
  std::vector<std::byte> whole;
  for (const auto* card : {first.get(), second.get()}) {
    const auto part = card->address();
    whole.push_back(static_cast<std::byte>(part.size()));
    whole.push_back(std::byte{0});
    whole.insert(whole.end(), part.begin(), part.end());
  }
  const PeerId liar = b_->connect(whole, "liar");
  const std::vector<std::byte> target = b_->address();
  const Bytes secondCard = Bytes(target).subspan(target.size() / 2 + sizeof(uint16_t));
  ASSERT_TRUE(second->control(second->connect(secondCard, "b"), pattern(17, 3)));
  runOut();
  EXPECT_EQ(atB_.failed.count(liar), 1u);
}

}  // namespace
}  // namespace smddp::transport::testing
