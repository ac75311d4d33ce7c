// Memory that is registered with a network card: which memory that is, and that it is never given back.
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <set>

#include "engine/calls.h"
#include "support/ranks.h"
#include "transport/fabric/fabric.h"
#include "transport/fabric/fabric_transport.h"

namespace smddp::test {
namespace {

using transport::PeerId;
using transport::RemoteKey;

// The tcp provider with the demands and quirks of EFA: it sends from registered memory only. Records all registrations.
class Card final : public transport::Transport {
 public:
  Card() {
    transport::fabric::Options options;
    options.provider = "tcp";
    options.masterAddress = "127.0.0.1";
    options.extraMrMode = FI_MR_LOCAL;
    options.quirksLike = "efa";
    inner_ = transport::fabric::create(options);
  }
  const std::set<const std::byte*>& targets() const { return targets_; }
  const std::set<const std::byte*>& sources() const { return sources_; }
  // Of all targets together.
  size_t targetBytes() const { return targetBytes_; }
  const transport::fabric::FabricTransport::Traffic& traffic() const {
    return dynamic_cast<const transport::fabric::FabricTransport&>(*inner_).traffic();
  }

  std::vector<std::byte> address() const override { return inner_->address(); }
  PeerId connect(transport::Bytes address, const std::string& description) override {
    return inner_->connect(address, description);
  }
  RemoteKey registerMemory(std::span<std::byte> memory) override {
    if (targets_.insert(memory.data()).second) targetBytes_ += memory.size();
    return inner_->registerMemory(memory);
  }
  bool addSource(std::span<std::byte> memory) override {
    sources_.insert(memory.data());
    return inner_->addSource(memory);
  }
  bool control(PeerId peer, transport::Bytes message) override {
    return inner_->control(peer, message);
  }
  bool put(PeerId peer, const transport::RemoteSlot& slot, uint32_t immediate,
           transport::Bytes header, transport::Payload payload, uint64_t token) override {
    return inner_->put(peer, slot, immediate, header, payload, token);
  }
  size_t poll(transport::Sink& sink) override { return inner_->poll(sink); }
  int waitDescriptor() const override { return inner_->waitDescriptor(); }
  bool prepareWait() override { return inner_->prepareWait(); }
  std::string describe() const override { return inner_->describe(); }

 private:
  std::unique_ptr<Transport> inner_;
  std::set<const std::byte*> targets_, sources_;
  size_t targetBytes_ = 0;
};

// `layout`: ranks per node. `body` gets the rank's card.
void runOnCards(const std::vector<int>& layout,
                const std::function<void(RankContext&, Card&)>& body) {
  std::vector<Card*> cards(static_cast<size_t>(std::accumulate(layout.begin(), layout.end(), 0)));
  runRanks(
      layout, [&](RankContext& rank) { body(rank, *cards[rank.rank]); },
      [&](Rank rank, engine::Engine::Options& options) {
        options.process.fabric = [&cards, rank] {
          auto card = std::make_unique<Card>();
          cards[rank] = card.get();
          return card;
        };
      });
}

void sumOnes(RankContext& rank, engine::groups::Group& group, size_t count) {
  std::vector<float> ones(count, 1.0f);
  auto request = allReduce(bytesOf(ones));
  request.willWait = true;
  request.timeout = kTimeout;
  const auto completion = rank.engine.submit(group, std::move(request));
  if (completion->error()) throw *completion->error();
  EXPECT_EQ(ones, std::vector<float>(count, static_cast<float>(rank.size)));
}

TEST(RegisteredMemoryTest, SumsLeaveFromWhereTheyAre) {
  runOnCards({2, 2}, [](RankContext& rank, Card& card) {
    // Vectors get longer, so that staging memory grows after puts were made from it.
    for (const size_t count : {size_t{20'000}, size_t{300'000}, size_t{2'000'000}}) {
      for (int round = 0; round < 4; ++round) sumOnes(rank, *rank.group, count);
    }
    rank.engine.progress().call([&] {
      EXPECT_GT(card.traffic().put, 4u * 2'000'000u);
      EXPECT_EQ(card.traffic().copied, 0u);
    });
  });
}

// Where every node has one rank, puts leave from the caller's tensor, which nobody has registered.
TEST(RegisteredMemoryTest, TensorsAreCopiedForACardThatMustKnowThem) {
  runOnCards({1, 1}, [](RankContext& rank, Card& card) {
    sumOnes(rank, *rank.group, 300'000);
    rank.engine.progress().call([&] {
      EXPECT_GT(card.traffic().put, 300'000u);
      EXPECT_EQ(card.traffic().copied, card.traffic().put);
    });
  });
}

TEST(RegisteredMemoryTest, ShortMessagesNeedLittleMemory) {
  runOnCards({1, 1}, [](RankContext& rank, Card& card) {
    const auto windowsOf = [&](size_t count) {
      for (int round = 0; round < 8; ++round) sumOnes(rank, *rank.group, count);
      size_t bytes = 0;
      rank.engine.progress().call([&] { bytes = card.targetBytes(); });
      return bytes;
    };
    EXPECT_LT(windowsOf(10), size_t{512} << 10);
    EXPECT_GT(windowsOf(300'000), size_t{2} << 20);
    // Both kinds of windows serve on.
    EXPECT_EQ(windowsOf(20), windowsOf(300'000));
  });
}

// A card writes to the pages that were registered. Pages that were given back would read as zeros, but the first line
// of each window must hold the header of a message since its first group.
TEST(RegisteredMemoryTest, GroupsThatComeAndGoUseTheSamePages) {
  runOnCards({2, 2}, [](RankContext& rank, Card& card) {
    constexpr size_t kGroups = 6;
    size_t ofOneGroup = 0;
    int givenBack = 0;
    std::weak_ptr<engine::groups::Group> before;
    for (size_t round = 0; round < kGroups; ++round) {
      // This takes memory of groups that all ranks have left.
      const auto group = rank.engine.createGroup(
          rank.store, {"group " + std::to_string(round), rank.rank, rank.size}, kTimeout);
      givenBack += round > 0 && before.expired();
      rank.engine.progress().call([&] {
        for (const std::byte* window : card.targets()) EXPECT_NE(*window, std::byte{0}) << round;
      });
      sumOnes(rank, *group, 300'000);
      if (round == 0) rank.engine.progress().call([&] { ofOneGroup = card.targets().size(); });
      rank.engine.destroyGroup(group);
      before = group;
      for (int i = 0; i < 3; ++i) rank.run(barrier());
    }
    rank.engine.progress().call([&] {
      EXPECT_GT(ofOneGroup, 0u);
      EXPECT_GT(givenBack, 0);
      EXPECT_LT(card.targets().size(), kGroups * ofOneGroup) << "no memory was used again";
      EXPECT_FALSE(card.sources().empty());
    });
  });
}

}  // namespace
}  // namespace smddp::test
