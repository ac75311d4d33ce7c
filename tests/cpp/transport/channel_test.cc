// The channel table over a transport that the test controls step by step. For random faults see channel_faults_test.cc.
#include "transport/channel_table.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include <gtest/gtest.h>

#include "common/error.h"

namespace smddp::transport {
namespace {

template <typename T>
std::vector<std::byte> copyOf(const T& message) {
  const Bytes bytes = bytesOf(message);
  return {bytes.begin(), bytes.end()};
}

// Records all calls; poll() reports the events that the test put into `events`.
class ScriptedTransport final : public Transport {
 public:
  struct Put {
    RemoteSlot slot;
    uint32_t immediate;
    PutHeader header;
    std::vector<std::byte> payload;
    uint64_t token;
  };
  std::vector<std::byte> address() const override { return {}; }
  PeerId connect(Bytes, const std::string&) override { return 0; }
  RemoteKey registerMemory(std::span<std::byte>) override { return {}; }
  bool control(PeerId peer, Bytes message) override {
    if (full) return false;
    controls.emplace_back(peer, std::vector<std::byte>(message.begin(), message.end()));
    return true;
  }
  bool put(PeerId, const RemoteSlot& slot, uint32_t immediate, Bytes header, Payload payload,
           uint64_t token) override {
    if (full) return false;
    PutHeader copy;
    std::memcpy(&copy, header.data(), sizeof(copy));
    puts.push_back({slot, immediate, copy, {payload.begin(), payload.end()}, token});
    return true;
  }
  size_t poll(Sink& sink) override {
    for (const auto& event : std::exchange(events, {})) event(sink);
    return 0;
  }
  void withdraw(std::span<std::byte> memory) override { withdrawn.push_back(memory.data()); }
  std::string describe() const override { return "scripted"; }

  bool full = false;
  std::vector<std::pair<PeerId, std::vector<std::byte>>> controls;
  std::vector<Put> puts;
  std::vector<const std::byte*> withdrawn;
  std::vector<std::function<void(Sink&)>> events;
};

struct Above final : ControlSink {
  void onControl(PeerId from, Bytes message) override {
    controls.emplace_back(from, std::vector<std::byte>(message.begin(), message.end()));
  }
  void onPeerFailed(PeerId peer, const std::string& cause) override {
    failed.emplace_back(peer, cause);
  }
  std::vector<std::pair<PeerId, std::vector<std::byte>>> controls;
  std::vector<std::pair<PeerId, std::string>> failed;
};

class ChannelTest : public ::testing::Test {
 protected:
  static constexpr int64_t kSlotBytes = 100;
  static constexpr PeerId kPeer = 4;
  const ChannelKey key_{0xABC, 1, 2, 6, 7};

  void hear(std::vector<std::byte> message, PeerId from = kPeer) {
    transport_.events.push_back([=](Sink& sink) { sink.onControl(from, message); });
    table_.poll();
  }
  void arrive(uint32_t immediate) {
    transport_.events.push_back([=](Sink& sink) { sink.onPut(immediate); });
    table_.poll();
  }
  void complete(uint64_t token) {
    transport_.events.push_back([=](Sink& sink) { sink.onPutDone(token); });
    table_.poll();
  }

  OpenMessage openFor(const ChannelKey& key, uint32_t window, uint16_t id) {
    OpenMessage open;
    open.header.channel = id;
    open.group = key.group;
    open.source = key.source;
    open.destination = key.destination;
    open.track = key.track;
    open.subchannel = key.subchannel;
    open.window = window;
    open.slotBytes = kSlotBytes;
    open.target = {11, 22};
    return open;
  }
  std::vector<std::byte> grantOf(uint16_t id, uint64_t released) {
    GrantMessage grant;
    grant.header.channel = id;
    grant.group = key_.group;
    grant.released = released;
    return copyOf(grant);
  }
  std::vector<std::byte> closeOf(uint16_t id, uint64_t group, uint64_t sent) {
    CloseMessage close;
    close.header.channel = id;
    close.group = group;
    close.sent = sent;
    return copyOf(close);
  }
  ReceiveChannel& receive(int64_t window) { return receive(key_, window); }
  ReceiveChannel& receive(const ChannelKey& key, int64_t window) {
    memory_.assign(static_cast<size_t>(window * slotStride(kSlotBytes)), std::byte{0});
    return table_.receive(key, kPeer, memory_, {1, 2}, kSlotBytes, window);
  }
  uint16_t lastOpenedId() const {
    return parseOpen(transport_.controls.back().second)->header.channel;
  }
  // Writes message `number` as its sender would.
  void write(const ReceiveChannel& channel, uint64_t number, uint32_t length = 8) {
    PutHeader header;
    header.group = channel.key().group;
    header.number = number;
    header.length = length;
    const auto slot = static_cast<int64_t>(number - 1) % channel.window() * slotStride(kSlotBytes);
    std::memcpy(&memory_[static_cast<size_t>(slot)], &header, sizeof(header));
  }
  std::vector<uint64_t> grantsSent() const {
    std::vector<uint64_t> grants;
    for (const auto& [peer, message] : transport_.controls) {
      if (const auto grant = parseGrant(message)) grants.push_back(grant->released);
    }
    return grants;
  }

  ScriptedTransport transport_;
  Above above_;
  ChannelTable table_{transport_, above_};
  std::vector<std::byte> memory_;
  const std::vector<std::byte> payload_ = std::vector<std::byte>(10, std::byte{5});
};

TEST_F(ChannelTest, PutWaitsForTheWindowAndNamesSlotAndMessage) {
  SendChannel& channel = table_.send(key_, kPeer);
  EXPECT_FALSE(channel.put(1, payload_, {}));
  hear(copyOf(openFor(key_, 2, 300)));
  ASSERT_TRUE(channel.isOpen());
  const CallFingerprint call{1, 2, 3, 4, 5, 6};
  EXPECT_TRUE(channel.put(1, payload_, call));
  EXPECT_TRUE(channel.put(2, {}, call));
  EXPECT_FALSE(channel.put(3, payload_, call)) << "no credit is left";
  ASSERT_EQ(transport_.puts.size(), 2u);
  const auto& [slot, immediate, header, payload, token] = transport_.puts[0];
  EXPECT_EQ(slot.target.address, 11u);
  EXPECT_EQ(slot.target.key, 22u);
  EXPECT_EQ(slot.offset, 0u);
  EXPECT_EQ(transport_.puts[1].slot.offset, 192u);
  EXPECT_EQ(immediate, makeImmediate(300, 1));
  EXPECT_EQ(header.group, key_.group);
  EXPECT_EQ(header.number, 1u);
  EXPECT_EQ(header.length, 10u);
  EXPECT_EQ(header.call, call);
  EXPECT_EQ(payload, payload_);
}

TEST_F(ChannelTest, PostedMessagesLieWhereTheyArePosted) {
  ReceiveChannel& channel = receive(4);
  const uint16_t id = lastOpenedId();
  std::array<std::byte, 8> first{}, third{};
  channel.post(1, first);
  channel.post(3, third);
  const auto place = [&](uint64_t number, size_t bytes, PeerId from = kPeer) {
    std::span<std::byte> found;
    transport_.events.push_back([&, number, bytes, from](Sink& sink) {
      found = sink.placeFor(from, makeImmediate(id, number), bytes);
    });
    table_.poll();
    return found.data();
  };
  EXPECT_EQ(place(1, 8, kPeer + 1), nullptr) << "another peer's channel";
  EXPECT_EQ(place(3, 7), nullptr) << "another length";
  EXPECT_EQ(place(1, 8), first.data());
  EXPECT_EQ(place(1, 8), nullptr) << "it is under way";
  EXPECT_EQ(place(2, 8), nullptr) << "it is not posted";
  for (const uint64_t number : {1, 2}) {
    write(channel, number);
    arrive(makeImmediate(id, number));
  }
  EXPECT_EQ(place(1, 8), nullptr) << "it is here";
  EXPECT_EQ(channel.payload(1).data(), first.data());
  EXPECT_NE(channel.payload(2).data(), first.data());
  EXPECT_EQ(place(3, 8), third.data());
  channel.withdrawPosts();
  ASSERT_EQ(transport_.withdrawn.size(), 2u);
  EXPECT_EQ(transport_.withdrawn.back(), third.data());
  // A header that names more bytes than have arrived there.
  channel.release(2);
  channel.post(4, first);
  EXPECT_EQ(place(4, 8), first.data());
  for (const uint64_t number : {3, 4}) {
    write(channel, number, 9);
    arrive(makeImmediate(id, number));
  }
  EXPECT_EQ(channel.payload(3).size(), 9u) << "in its slot";
  EXPECT_THROW(channel.payload(4), Error);
}

TEST_F(ChannelTest, AnOpenThatCameFirstIsKept) {
  hear(copyOf(openFor(key_, 1, 0)));
  EXPECT_TRUE(table_.send(key_, kPeer).isOpen());
  EXPECT_EQ(&table_.send(key_, kPeer), &table_.send(key_, kPeer));
}

TEST_F(ChannelTest, GrantsGiveCreditAndFlushedIsAPrefix) {
  SendChannel& channel = table_.send(key_, kPeer);
  hear(copyOf(openFor(key_, 2, 9)));
  ASSERT_TRUE(channel.put(1, payload_, {}));
  ASSERT_TRUE(channel.put(2, payload_, {}));
  complete(transport_.puts[1].token);
  EXPECT_EQ(channel.flushed(), 0u);
  complete(transport_.puts[1].token);
  EXPECT_EQ(channel.flushed(), 0u) << "a second completion moved it";
  hear(grantOf(9, 1));
  EXPECT_FALSE(channel.put(3, payload_, {})) << "the payload of put 1 is still in flight";
  complete(transport_.puts[0].token);
  EXPECT_EQ(channel.flushed(), 2u);
  EXPECT_TRUE(channel.put(3, payload_, {}));
  EXPECT_EQ(transport_.puts[2].slot.offset, 0u) << "slot 0 again";
  EXPECT_FALSE(channel.put(4, payload_, {}));
}

TEST_F(ChannelTest, RefusedPutsChangeNothing) {
  SendChannel& channel = table_.send(key_, kPeer);
  hear(copyOf(openFor(key_, 2, 9)));
  transport_.full = true;
  EXPECT_FALSE(channel.put(1, payload_, {}));
  EXPECT_EQ(channel.sent(), 0u);
  transport_.full = false;
  EXPECT_TRUE(channel.put(1, payload_, {}));
}

TEST_F(ChannelTest, APayloadLongerThanTheSlotIsAMismatch) {
  SendChannel& channel = table_.send(key_, kPeer);
  hear(copyOf(openFor(key_, 2, 9)));
  try {
    (void)channel.put(1, std::vector<std::byte>(kSlotBytes + 1), {});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::Mismatch) << e.what();
  }
}

TEST_F(ChannelTest, ArrivedIsTheContiguousPrefix) {
  ReceiveChannel& channel = receive(4);
  const uint16_t id = lastOpenedId();
  for (const uint64_t n : {1, 2, 3, 4}) write(channel, n);
  arrive(makeImmediate(id, 3));
  arrive(makeImmediate(id, 2));
  EXPECT_EQ(channel.arrived(), 0u);
  arrive(makeImmediate(id, 1));
  EXPECT_EQ(channel.arrived(), 3u);
  arrive(makeImmediate(id, 3));  // again
  arrive(makeImmediate(id, 5));  // beyond the window
  arrive(makeImmediate(id + 1, 4));
  EXPECT_EQ(channel.arrived(), 3u);
  arrive(makeImmediate(id, 4));
  EXPECT_EQ(channel.arrived(), 4u);
  EXPECT_EQ(channel.header(4).number, 4u);
  EXPECT_EQ(channel.payload(2).data(), memory_.data() + slotStride(kSlotBytes) + kHeaderBytes);
  EXPECT_EQ(channel.payload(2).size(), 8u);
}

TEST_F(ChannelTest, WhatIsNotTheMessageIsATransportError) {
  ReceiveChannel& channel = receive(4);
  const uint16_t id = lastOpenedId();
  write(channel, 1);
  memory_[0] ^= std::byte{1};         // magic
  write(channel, 2, kSlotBytes + 1);  // length
  write(channel, 3);
  memory_[static_cast<size_t>(2 * slotStride(kSlotBytes)) + 16] ^= std::byte{1};  // number
  write(channel, 4);
  memory_[static_cast<size_t>(3 * slotStride(kSlotBytes)) + 8] ^= std::byte{1};  // group
  for (const uint64_t n : {1, 2, 3, 4}) {
    arrive(makeImmediate(id, n));
    try {
      (void)channel.payload(n);
      FAIL() << "message " << n;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::Transport) << e.what();
    }
  }
}

TEST_F(ChannelTest, GrantsAreBatchedByHalfTheWindow) {
  ReceiveChannel& channel = receive(8);
  const uint16_t id = lastOpenedId();
  for (uint64_t n = 1; n <= 7; ++n) arrive(makeImmediate(id, n));
  for (uint64_t n = 1; n <= 7; ++n) channel.release(n);
  EXPECT_EQ(grantsSent(), (std::vector<uint64_t>{4}));
  table_.sendGrantsNow();
  table_.sendGrantsNow();
  EXPECT_EQ(grantsSent(), (std::vector<uint64_t>{4, 7}));
}

TEST_F(ChannelTest, ASenderWithoutCreditIsGrantedAtOnce) {
  ReceiveChannel& channel = receive(8);
  const uint16_t id = lastOpenedId();
  for (uint64_t n = 1; n <= 7; ++n) arrive(makeImmediate(id, n));
  channel.release(1);
  EXPECT_TRUE(grantsSent().empty());
  arrive(makeImmediate(id, 8));
  EXPECT_EQ(grantsSent(), (std::vector<uint64_t>{1})) << "the last credit was used";
  channel.release(2);
  EXPECT_EQ(grantsSent(), (std::vector<uint64_t>{1})) << "the sender has one credit again";
}

TEST_F(ChannelTest, RefusedControlIsKeptInOrder) {
  transport_.full = true;
  receive(1);
  table_.control(kPeer, makeAbort(1, 1, "second"));
  table_.control(kPeer + 1, makeAbort(1, 1, "to another peer"));
  EXPECT_TRUE(table_.hasBacklog());
  transport_.full = false;
  table_.control(kPeer, makeAbort(1, 1, "third"));  // there is room now, but earlier messages wait
  table_.poll();
  EXPECT_FALSE(table_.hasBacklog());
  ASSERT_EQ(transport_.controls.size(), 4u);
  EXPECT_TRUE(parseOpen(transport_.controls[0].second));
  EXPECT_EQ(parseAbort(transport_.controls[1].second)->text, "second");
  EXPECT_EQ(parseAbort(transport_.controls[2].second)->text, "third");
  EXPECT_EQ(transport_.controls[3].first, kPeer + 1);
}

TEST_F(ChannelTest, AGrantThatWaitsGrows) {
  ReceiveChannel& channel = receive(2);
  const uint16_t id = lastOpenedId();
  arrive(makeImmediate(id, 1));
  arrive(makeImmediate(id, 2));
  transport_.full = true;
  channel.release(1);
  channel.release(2);
  EXPECT_TRUE(table_.hasBacklog());
  transport_.full = false;
  table_.poll();
  EXPECT_EQ(grantsSent(), (std::vector<uint64_t>{2}));
  EXPECT_FALSE(table_.hasBacklog());
}

TEST_F(ChannelTest, FlushedGrantsThatWereRefusedAreSentLater) {
  ReceiveChannel& channel = receive(8);
  arrive(makeImmediate(lastOpenedId(), 1));
  channel.release(1);
  transport_.full = true;
  table_.sendGrantsNow();
  EXPECT_TRUE(table_.hasBacklog());
  transport_.full = false;
  table_.poll();
  EXPECT_EQ(grantsSent(), (std::vector<uint64_t>{1}));
  EXPECT_FALSE(table_.hasBacklog());
}

TEST_F(ChannelTest, EngineMessagesAndAbortsAreHandedOn) {
  ControlHeader engine;
  engine.kind = kFirstEngineKind;
  hear(copyOf(engine));
  hear(makeAbort(3, 1, "why"));
  ASSERT_EQ(above_.controls.size(), 2u);
  EXPECT_EQ(above_.controls[0].second, copyOf(engine));
  EXPECT_TRUE(parseAbort(above_.controls[1].second));
  EXPECT_TRUE(above_.failed.empty());
}

TEST_F(ChannelTest, APeerThatBreaksTheProtocolFailsOnce) {
  hear({std::byte{99}, std::byte{42}});
  hear({});
  ASSERT_EQ(above_.failed.size(), 1u);
  EXPECT_EQ(above_.failed[0].first, kPeer);
  const size_t sent = transport_.controls.size();
  table_.control(kPeer, makeAbort(1, 1, "nobody hears this"));
  EXPECT_EQ(transport_.controls.size(), sent);
}

TEST_F(ChannelTest, CreditForMessagesThatWereNeverSentFailsThePeer) {
  SendChannel& channel = table_.send(key_, kPeer);
  hear(copyOf(openFor(key_, 2, 9)));
  ASSERT_TRUE(channel.put(1, payload_, {}));
  hear(grantOf(9, 2));
  EXPECT_EQ(above_.failed.size(), 1u);
}

TEST_F(ChannelTest, AFailedPeerLeavesNoBacklog) {
  transport_.full = true;
  receive(2);
  EXPECT_TRUE(table_.hasBacklog());
  transport_.events.push_back([](Sink& sink) { sink.onPeerFailed(kPeer, "gone"); });
  table_.poll();
  EXPECT_FALSE(table_.hasBacklog());
  ASSERT_EQ(above_.failed.size(), 1u);
  EXPECT_EQ(above_.failed[0].second, "gone");
}

TEST_F(ChannelTest, ClosingASenderTellsHowMuchWasSentAndWaitsForItsPuts) {
  SendChannel& channel = table_.send(key_, kPeer);
  hear(copyOf(openFor(key_, 2, 9)));
  ASSERT_TRUE(channel.put(1, payload_, {}));
  table_.closeGroup(key_.group);
  const auto close = parseClose(transport_.controls.back().second);
  ASSERT_TRUE(close);
  EXPECT_EQ(close->header.channel, 9);
  EXPECT_EQ(close->sent, 1u);
  EXPECT_FALSE(table_.drained(key_.group, kPeer));
  hear(grantOf(9, 1));  // late, and harmless
  complete(transport_.puts[0].token);
  EXPECT_TRUE(table_.drained(key_.group, kPeer));
  complete(transport_.puts[0].token);
  EXPECT_TRUE(above_.failed.empty());
}

TEST_F(ChannelTest, OpensForAClosedGroupAreAnsweredByClose) {
  hear(copyOf(openFor(key_, 2, 5)));  // kept, but send() is never called for it
  table_.closeGroup(key_.group);
  hear(copyOf(openFor({key_.group, 0, 0, 1, 2}, 2, 6)));  // late
  ASSERT_EQ(transport_.controls.size(), 2u);
  for (const int i : {0, 1}) {
    const auto close = parseClose(transport_.controls[static_cast<size_t>(i)].second);
    ASSERT_TRUE(close);
    EXPECT_EQ(close->header.channel, 5 + i);
    EXPECT_EQ(close->sent, 0u);
  }
}

TEST_F(ChannelTest, AnIdIsFreeOnlyWhenNoPutCanNameItAnyMore) {
  ReceiveChannel& channel = receive(4);
  const uint16_t id = lastOpenedId();
  for (const uint64_t n : {1, 2}) write(channel, n);
  arrive(makeImmediate(id, 1));
  table_.closeGroup(key_.group);
  memory_.clear();
  memory_.shrink_to_fit();  // a read of it after this is an ASan error
  EXPECT_FALSE(table_.drained(key_.group, kPeer));
  hear(closeOf(id, key_.group, 2));
  EXPECT_FALSE(table_.drained(key_.group, kPeer)) << "message 2 is still under way";
  arrive(makeImmediate(id, 2));
  EXPECT_TRUE(table_.drained(key_.group, kPeer));
  arrive(makeImmediate(id, 2));
}

TEST_F(ChannelTest, APeerIsDrainedAlthoughAnotherFailed) {
  constexpr PeerId kOther = 5;
  receive(4);
  table_.send({key_.group, 0, 0, 7, 8}, kOther);
  const auto id = lastOpenedId();
  std::vector<std::byte> memory(1 << 10);
  table_.receive({key_.group, 0, 0, 8, 7}, kOther, memory, {}, kSlotBytes, 1);
  transport_.events.push_back([](Sink& sink) { sink.onPeerFailed(kOther, "gone"); });
  table_.poll();
  table_.closeGroup(key_.group);
  EXPECT_FALSE(table_.drained(key_.group, kPeer));
  hear(closeOf(id, key_.group, 0));
  EXPECT_TRUE(table_.drained(key_.group, kPeer));
  EXPECT_FALSE(table_.drained(key_.group, kOther)) << "a message may be under way";
}

TEST_F(ChannelTest, AChannelOutlivesTheCloseOfItsSender) {
  ReceiveChannel& channel = receive(4);
  write(channel, 1);
  arrive(makeImmediate(lastOpenedId(), 1));
  hear(closeOf(lastOpenedId(), key_.group, 1));
  ASSERT_FALSE(table_.drained(key_.group, kPeer)) << "the receiver has not closed its end";
  EXPECT_EQ(channel.payload(1).size(), 8u);
  table_.closeGroup(key_.group);
  EXPECT_TRUE(table_.drained(key_.group, kPeer));
}

TEST_F(ChannelTest, IdsAreReusedAfterAllOthersWereAndExhaustionIsAnError) {
  const auto openGroup = [&](uint64_t group) {
    receive({group, 0, 0, 0, 1}, 1);
    return lastOpenedId();
  };
  for (uint64_t group = 1; group <= 65536; ++group) ASSERT_EQ(openGroup(group), group - 1);
  EXPECT_THROW(openGroup(100'000), Error);
  for (const uint64_t group : {70, 50}) {
    table_.closeGroup(group);
    hear(closeOf(static_cast<uint16_t>(group - 1), group, 0));
  }
  EXPECT_EQ(openGroup(100'001), 69);
  EXPECT_EQ(openGroup(100'002), 49);
}

}  // namespace
}  // namespace smddp::transport
