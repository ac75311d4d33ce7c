#include "transport/fabric/fabric.h"

#include <rdma/fabric.h>

#include <gmock/gmock.h>

#include "support/watchdog.h"
#include "transport/fabric/fabric_transport.h"
#include "transport/striped_transport.h"
#include "transport/transport_suite.h"

namespace smddp::transport::testing {
namespace {

using fabric::Options;
using ::testing::HasSubstr;

class FabricFixture final : public HeapFixture {
 public:
  FabricFixture(std::vector<std::unique_ptr<Transport>> transports, bool survives)
      : HeapFixture(std::move(transports)), survives_(survives) {}
  bool survivesDestruction() const override { return survives_; }

 private:
  bool survives_;
};

Kind kindOf(const std::string& name, const Options& options) {
  return {name, [options](int count) {
            std::vector<std::unique_ptr<Transport>> transports;
            for (int i = 0; i < count; ++i) transports.push_back(fabric::create(options));
            // libfabric's shm provider 1.17 reads freed memory of an endpoint of the same process.
            return std::make_unique<FabricFixture>(std::move(transports),
                                                   options.provider != "shm");
          }};
}

// Several endpoints as one transport.
Kind stripedOver(const std::string& name, const Options& options, int numCards) {
  return {name, [=](int count) {
            std::vector<std::unique_ptr<Transport>> transports;
            for (int i = 0; i < count; ++i) {
              std::vector<std::unique_ptr<Transport>> cards;
              for (int card = 0; card < numCards; ++card) cards.push_back(fabric::create(options));
              transports.push_back(std::make_unique<StripedTransport>(std::move(cards)));
            }
            return std::make_unique<FabricFixture>(std::move(transports), true);
          }};
}

Options optionsFor(const std::string& provider, bool rma = true) {
  Options options;
  options.provider = provider;
  options.rma = rma;
  if (provider != "shm") options.masterAddress = "127.0.0.1";
  return options;
}

// tcp with the demands of a network card.
Options demanding(int mrMode, size_t iovLimit, bool rma) {
  Options options = optionsFor("tcp", rma);
  options.extraMrMode = mrMode;
  options.iovLimit = iovLimit;
  return options;
}

// tcp with all quirks of EFA.
Options likeEfa() {
  Options options = demanding(FI_MR_LOCAL, 4, true);
  options.quirksLike = "efa";
  return options;
}

// Options of a rank that wants to send from memory of devices.
Options forDevices(Options options) {
  options.devices = true;
  return options;
}

INSTANTIATE_TEST_SUITE_P(
    Fabric, TransportSuite,
    ::testing::Values(
        kindOf("tcp", optionsFor("tcp")), kindOf("tcp_without_rma", optionsFor("tcp", false)),
        stripedOver("tcp_two_cards", optionsFor("tcp"), 2),
        stripedOver("tcp_three_cards_without_rma", optionsFor("tcp", false), 3),
        kindOf("tcp_mr_local", demanding(FI_MR_LOCAL, 4, true)),
        kindOf("tcp_one_piece", demanding(0, 1, true)),
        kindOf("tcp_mr_local_one_piece", demanding(FI_MR_LOCAL, 1, true)),
        kindOf("tcp_mr_local_one_piece_without_rma", demanding(FI_MR_LOCAL, 1, false)),
        kindOf("tcp_like_efa", likeEfa()), stripedOver("tcp_two_cards_like_efa", likeEfa(), 2),
        kindOf("rxm", optionsFor("tcp;ofi_rxm")),
        kindOf("rxm_without_rma", optionsFor("tcp;ofi_rxm", false)),
        kindOf("shm", optionsFor("shm")), kindOf("shm_for_devices", forDevices(optionsFor("shm"))),
        kindOf("shm_without_rma", optionsFor("shm", false))),
    kindName);

// One pair of transports over loopback, polled by hand.
struct Pair {
  explicit Pair(const Options& options) : a(fabric::create(options)), b(fabric::create(options)) {
    toB = a->connect(b->address(), "b");
    toA = b->connect(a->address(), "a");
  }
  bool pollUntil(const std::function<bool()>& condition) {
    const MonotonicClock clock;
    const Deadline deadline = Deadline::after(clock, 10'000'000'000);
    while (!condition() && !deadline.passed(clock)) {
      a->poll(atA);
      b->poll(atB);
    }
    return condition();
  }
  std::vector<std::byte> memory = std::vector<std::byte>(64 * 1024);  // outlives the transports
  std::unique_ptr<Transport> a, b;
  RecordingSink atA, atB;
  PeerId toA, toB;
};

// Checks that the first put of a pair arrives completely and once, at byte 128 of b's memory.
void expectArrival(Pair& pair, const RemoteKey& key, Bytes header, const Payload& payload,
                   bool copied) {
  ASSERT_TRUE(pair.a->put(pair.toB, {key, 128}, 7, header, payload, 1));
  ASSERT_TRUE(pair.pollUntil([&] { return pair.atB.puts.count(7) == 1; }));
  ASSERT_TRUE(pair.pollUntil([&] { return pair.atA.done.count(1) == 1; }));
  EXPECT_EQ(pair.atB.puts[7], 1);
  EXPECT_TRUE(std::equal(header.begin(), header.end(), pair.memory.begin() + 128));
  EXPECT_TRUE(std::equal(payload.begin(), payload.end(), pair.memory.begin() + 128 + kHeaderBytes));
  const auto& traffic = dynamic_cast<fabric::FabricTransport&>(*pair.a).traffic();
  EXPECT_EQ(traffic.put, payload.size());
  EXPECT_EQ(traffic.copied, copied ? payload.size() : 0);
}

TEST(FabricTransport, ConnectingTwiceGivesTheSamePeer) {
  Pair pair(optionsFor("tcp"));
  EXPECT_EQ(pair.a->connect(pair.b->address(), "b again"), pair.toB);
}

TEST(FabricTransport, PeersMustUseTheSameProviderAndProtocol) {
  const auto tcp = fabric::create(optionsFor("tcp"));
  for (const Options& options : {optionsFor("tcp;ofi_rxm"), optionsFor("tcp", false)}) {
    const auto other = fabric::create(options);
    try {
      tcp->connect(other->address(), "rank 3");
      FAIL() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::Usage);
      EXPECT_THAT(error.what(), HasSubstr("rank 3"));
      EXPECT_THAT(error.what(),
                  HasSubstr(options.rma ? "tcp;ofi_rxm" : "sends into posted receives"));
    }
  }
}

// Each pair of processes has a proof of its own, so that one that is known to a rank does not open another.
TEST(FabricTransport, MessagesWithoutTheTokenReachNobody) {
  for (const bool rma : {true, false}) {
    SCOPED_TRACE(rma ? "remote writes" : "fragments");
    Options ours = optionsFor("tcp", rma), none = ours, other = ours;
    ours.seal = Seal("secret");
    other.seal = Seal("guess");
    Pair pair(ours);
    const auto message = pattern(50, 1), header = pattern(kHeaderBytes, 2), data = pattern(100, 3);
    const RemoteKey key = pair.b->registerMemory(pair.memory);
    std::vector<std::unique_ptr<Transport>> strangers;
    RecordingSink atStranger;
    for (const Options& options : {none, other}) {
      Transport& stranger = *strangers.emplace_back(fabric::create(options));
      const PeerId toB = stranger.connect(pair.b->address(), "b");
      ASSERT_TRUE(stranger.control(toB, message));
      // Who has the key of a region may write to it. Fragments are for us to refuse.
      if (!rma) {
        ASSERT_TRUE(stranger.put(toB, {key, 128}, 5, header, data, 1));
      }
      EXPECT_TRUE(pair.pollUntil([&] {
        stranger.poll(atStranger);
        return rma || atStranger.done.count(1) == 1;
      }));
      // Now it is known, but it cannot prove it.
      const PeerId atB = pair.b->connect(stranger.address(), "stranger");
      for (int i = 0; i < 10; ++i) ASSERT_TRUE(stranger.control(toB, message));
      EXPECT_NE(atB, pair.toA);
    }
    ASSERT_TRUE(pair.a->control(pair.toB, message));
    ASSERT_TRUE(pair.a->put(pair.toB, {key, 128}, 7, header, data, 1));
    EXPECT_TRUE(pair.pollUntil([&] {
      for (const auto& stranger : strangers) stranger->poll(atStranger);
      return pair.atB.puts.count(7) == 1 && !pair.atB.controls.empty();
    }));
    for (int i = 0; i < 1000; ++i) pair.b->poll(pair.atB);
    EXPECT_EQ(pair.atB.controls, (decltype(pair.atB.controls){{pair.toA, message}}));
    EXPECT_EQ(pair.atB.puts, (std::map<uint32_t, int>{{7, 1}}));
  }
}

TEST(FabricTransport, AddressThatIsNoneIsRefused) {
  const auto tcp = fabric::create(optionsFor("tcp"));
  const auto address = tcp->address();
  for (size_t length = 0; length < address.size(); ++length)
    EXPECT_THROW(tcp->connect(Bytes(address).first(length), "x"), Error) << length << " bytes";
}

TEST(FabricTransport, SameMemoryKeepsItsKey) {
  Pair pair(optionsFor("tcp"));
  const RemoteKey first = pair.b->registerMemory(pair.memory);
  const RemoteKey again = pair.b->registerMemory(pair.memory);
  EXPECT_EQ(first.key, again.key);
  EXPECT_EQ(first.address, again.address);
  EXPECT_NE(pair.b->registerMemory(std::span(pair.memory).first(4096)).key, first.key);
}

// For a card that sends from registered memory only, with one or several pieces per write.
TEST(FabricTransport, WhatLiesInASourceLeavesWithoutACopy) {
  struct Case {
    size_t iovLimit;
    size_t bytes;
    bool inSource;
    bool copied;
  };
  for (const Case& c :
       {Case{4, 100, true, false}, Case{4, 20'000, true, false}, Case{4, 20'000, false, true},
        Case{1, 100, true, true}, Case{1, 20'000, true, false}, Case{1, 20'000, false, true}}) {
    SCOPED_TRACE(fmt::format("{} pieces, {} bytes, {}", c.iovLimit, c.bytes, c.inSource));
    auto source = pattern(64 * 1024, 3), other = pattern(64 * 1024, 4);
    Pair pair(demanding(FI_MR_LOCAL, c.iovLimit, true));
    const RemoteKey key = pair.b->registerMemory(pair.memory);
    EXPECT_TRUE(pair.a->addSource(source));
    const auto header = pattern(kHeaderBytes, 1);
    const auto payload = Bytes(c.inSource ? source : other).subspan(1000, c.bytes);
    ASSERT_NO_FATAL_FAILURE(expectArrival(pair, key, header, payload, c.copied));
  }
}

// For any length, also for lengths at which memory of the host would be copied.
TEST(FabricTransport, WhatLiesOnADeviceLeavesFromThere) {
  for (const size_t bytes : {size_t{1}, size_t{100}, size_t{20'000}}) {
    SCOPED_TRACE(bytes);
    auto source = pattern(64 * 1024, 3);
    Pair pair(forDevices(optionsFor("shm")));
    EXPECT_THAT(pair.a->describe(), HasSubstr("reaches memory of devices"));
    const RemoteKey key = pair.b->registerMemory(pair.memory);
    ASSERT_EQ(pair.a->addDeviceSource({source}), "");
    const auto header = pattern(kHeaderBytes, 1);
    const Payload payload(Bytes(source).subspan(1000, bytes), /*isOnDevice=*/true);
    ASSERT_NO_FATAL_FAILURE(expectArrival(pair, key, header, payload, /*copied=*/false));
    // Memory that was removed must not be read by the host.
    pair.a->removeDeviceSource(source);
    EXPECT_THROW((void)pair.a->put(pair.toB, {key, 128}, 8, header, payload, 2), Error);
  }
}

TEST(FabricTransport, SaysWhyNothingLeavesADevice) {
  auto source = pattern(4096, 3);
  struct Case {
    Options options;
    const char* why;
  };
  for (const auto& [options, why] :
       {Case{optionsFor("shm"), "provider shm does not reach memory of devices"},
        Case{forDevices(optionsFor("tcp")), "does not reach memory of devices"},
        Case{forDevices(optionsFor("shm", false)), "no remote writes"}}) {
    EXPECT_THAT(fabric::create(options)->addDeviceSource({source}), HasSubstr(why));
  }
  // This libfabric was built without support for this device.
  try {
    fabric::create(forDevices(optionsFor("shm")))
        ->addDeviceSource({source, DeviceMemory::Kind::Cuda, 0});
    FAIL() << "registered";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Resource);
    EXPECT_THAT(error.what(), HasSubstr("cannot register 4096 bytes of a device's memory"));
  }
}

// A provider such as EFA's would block for ever when the endpoint is closed.
TEST(FabricTransport, EndsAlthoughAPeerTakesNothing) {
  Pair pair(likeEfa());
  const RemoteKey key = pair.b->registerMemory(pair.memory);
  const auto header = pattern(kHeaderBytes, 1);
  const auto payload = pattern(32 * 1024, 2);
  EXPECT_TRUE(pair.a->addSource({const_cast<std::byte*>(payload.data()), payload.size()}));
  // The peer is connected, but then never polls.
  ASSERT_TRUE(pair.a->put(pair.toB, {key, 0}, 0, header, payload, 0));
  ASSERT_TRUE(pair.pollUntil([&] { return pair.atA.done.count(0) == 1; }));
  EXPECT_TRUE(pair.pollUntil([&] { return pair.a->isDelivered(pair.toB); }));
  const MonotonicClock clock;
  const Deadline filled = Deadline::after(clock, 2'000'000'000);
  for (uint32_t i = 1; !filled.passed(clock); ++i) {
    if (!pair.a->put(pair.toB, {key, 0}, i, header, payload, i)) pair.a->poll(pair.atA);
  }
  EXPECT_FALSE(pair.a->isDelivered(pair.toB));
  const test::Watchdog watchdog;
  pair.a.reset();
}

TEST(FabricTransport, PutOutsideTheRegionCondemnsTheSenderAndWritesNothing) {
  Pair pair(optionsFor("tcp", /*rma=*/false));
  const RemoteKey key = pair.b->registerMemory(std::span(pair.memory).first(4096));
  const auto header = pattern(kHeaderBytes, 1);
  const auto payload = pattern(1000, 2);
  const RemoteSlot beyond{key, 4096 - 1000};  // the header fits, the last 48 bytes do not
  ASSERT_TRUE(pair.a->put(pair.toB, beyond, 7, header, payload, 1));
  ASSERT_TRUE(pair.pollUntil([&] { return pair.atB.failed.count(pair.toA) == 1; }));
  EXPECT_THAT(pair.atB.failed[pair.toA], HasSubstr("not our memory"));
  EXPECT_TRUE(pair.atB.puts.empty());
  EXPECT_THAT(pair.memory, ::testing::Each(std::byte{0}));
  EXPECT_FALSE(pair.b->control(pair.toA, header)) << "a condemned peer gets nothing more";
}

TEST(FabricTransport, DescribesItsChoice) {
  const std::string text = fabric::create(optionsFor("tcp"))->describe();
  EXPECT_THAT(text, HasSubstr("127.0.0.1"));
  EXPECT_THAT(text, HasSubstr("remote writes"));
  EXPECT_THAT(text, HasSubstr("provider by SMDDP_PROVIDER"));
}

TEST(FabricTransport, ProviderThatIsMissingIsAnError) {
  try {
    fabric::create(optionsFor("warp"));
    FAIL() << "created";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Usage);
    EXPECT_THAT(error.what(), HasSubstr("tcp;ofi_rxm")) << "lists what there is";
  }
}

}  // namespace
}  // namespace smddp::transport::testing
