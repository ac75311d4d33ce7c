#include "transport/transport_suite.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "common/error.h"

namespace smddp::transport::testing {
namespace {

// Checks that the slot at `offset` of the target holds header and payload, and that all bytes around it are unchanged.
::testing::AssertionResult slotHolds(std::span<const std::byte> memory, size_t offset, Bytes header,
                                     Bytes payload) {
  if (!std::equal(header.begin(), header.end(), memory.begin() + offset))
    return ::testing::AssertionFailure() << "header differs";
  const auto body = memory.subspan(offset + header.size(), payload.size());
  const auto [want, got] = std::mismatch(payload.begin(), payload.end(), body.begin());
  if (want != payload.end())
    return ::testing::AssertionFailure() << "payload differs at byte " << (want - payload.begin());
  return ::testing::AssertionSuccess();
}

}  // namespace

void TransportSuite::start(int count, bool connect) {
  try {
    fixture_ = GetParam().create(count);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::Usage) throw;
    GTEST_SKIP() << error.what();
  }
  sinks_.resize(count);
  alive_.assign(count, true);
  peerOf_.assign(count, std::vector<PeerId>(count, -1));
  for (int a = 0; connect && a < count; ++a) {
    for (int b = 0; b < count; ++b) {
      if (a != b) introduce(a, b);
    }
  }
}

void TransportSuite::introduce(int a, int b) {
  const std::vector<std::byte> address = at(b).address();
  EXPECT_LE(address.size(), 512u);
  peerOf_[a][b] = at(a).connect(address, "transport " + std::to_string(b));
}

void TransportSuite::pollAll() {
  fixture_->advance();
  for (size_t i = 0; i < sinks_.size(); ++i) {
    if (alive_[i]) at(static_cast<int>(i)).poll(sinks_[i]);
  }
}

bool TransportSuite::pollUntil(const std::function<bool()>& condition) {
  const Deadline deadline = Deadline::after(clock_, kDeadline);
  while (!condition()) {
    if (deadline.passed(clock_)) return false;
    pollAll();
  }
  return true;
}

void TransportSuite::send(int from, int to, Bytes message) {
  ASSERT_TRUE(pollUntil([&] { return at(from).control(peerOf_[from][to], message); }))
      << "no room for a control message";
}
void TransportSuite::put(int from, int to, const RemoteSlot& slot, uint32_t immediate, Bytes header,
                         Bytes payload, uint64_t token) {
  ASSERT_TRUE(pollUntil([&] {
    return at(from).put(peerOf_[from][to], slot, immediate, header, payload, token);
  })) << "no room for put "
      << token;
}

void TransportSuite::expectNobodyFailed() {
  for (const RecordingSink& sink : sinks_) {
    for (const auto& [peer, cause] : sink.failed) ADD_FAILURE() << "peer " << peer << ": " << cause;
  }
}

TEST_P(TransportSuite, ControlArrivesInOrderBothWays) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  if (IsSkipped()) return;
  constexpr uint32_t kMessages = 400;
  const auto messageOf = [](int from, uint32_t i) {
    return pattern(1 + (i * 37) % kMaxControlBytes, i + 1000 * from);
  };
  for (uint32_t i = 0; i < kMessages; ++i) {
    for (int from : {0, 1}) ASSERT_NO_FATAL_FAILURE(send(from, 1 - from, messageOf(from, i)));
  }
  ASSERT_TRUE(pollUntil([&] {
    return sinks_[0].controls.size() >= kMessages && sinks_[1].controls.size() >= kMessages;
  }));
  for (int to : {0, 1}) {
    ASSERT_EQ(sinks_[to].controls.size(), kMessages);
    for (uint32_t i = 0; i < kMessages; ++i) {
      EXPECT_EQ(sinks_[to].controls[i].first, peerOf_[to][1 - to]);
      ASSERT_EQ(sinks_[to].controls[i].second, messageOf(1 - to, i)) << "message " << i;
    }
  }
  expectNobodyFailed();
}

TEST_P(TransportSuite, ControlThatArrivesBeforeConnectIsDeliveredAfterIt) {
  ASSERT_NO_FATAL_FAILURE(start(2, /*connect=*/false));
  if (IsSkipped()) return;
  introduce(0, 1);
  for (uint32_t i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(send(0, 1, pattern(100, i)));
  for (int i = 0; i < 2000; ++i) pollAll();
  EXPECT_TRUE(sinks_[1].controls.empty()) << "delivered from a peer that has no id yet";
  introduce(1, 0);
  ASSERT_NO_FATAL_FAILURE(send(0, 1, pattern(100, 3)));
  ASSERT_TRUE(pollUntil([&] { return sinks_[1].controls.size() >= 4; }));
  ASSERT_EQ(sinks_[1].controls.size(), 4u);
  for (uint32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(sinks_[1].controls[i].first, peerOf_[1][0]);
    EXPECT_EQ(sinks_[1].controls[i].second, pattern(100, i)) << "message " << i;
  }
}

TEST_P(TransportSuite, PutDeliversHeaderPayloadAndImmediate) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  if (IsSkipped()) return;
  constexpr size_t kOffset = 4096;
  const std::vector<std::pair<size_t, uint32_t>> cases = {
      {0, 0}, {1, kMaxImmediate}, {7, 1}, {4096, 2}, {65536, 0x40000000u}, {(5u << 20) + 13, 77}};
  uint64_t token = 1;
  for (const auto& [size, value] : cases) {
    SCOPED_TRACE("size " + std::to_string(size));
    const uint32_t immediate = value;  // clang 14 captures no structured binding
    const auto target = fixture_->allocate(1, kOffset + kHeaderBytes + size + 64);
    const RemoteKey key = at(1).registerMemory(target);
    const auto header = pattern(kHeaderBytes, 11);
    const auto payload = pattern(size, 22);
    ASSERT_NO_FATAL_FAILURE(put(0, 1, {key, kOffset}, immediate, header, payload, token));
    ASSERT_TRUE(
        pollUntil([&] { return sinks_[1].puts.count(immediate) && sinks_[0].done.count(token); }));
    EXPECT_TRUE(slotHolds(target, kOffset, header, payload));
    const auto isZero = [](std::byte b) { return b == std::byte{0}; };
    EXPECT_TRUE(std::all_of(target.begin(), target.begin() + kOffset, isZero))
        << "bytes in front written";
    EXPECT_TRUE(std::all_of(target.end() - 64, target.end(), isZero)) << "bytes behind written";
    EXPECT_EQ(sinks_[1].puts[immediate], 1);
    EXPECT_EQ(sinks_[0].done[token], 1);
    ++token;
  }
  expectNobodyFailed();
}

TEST_P(TransportSuite, ManyPutsArriveOnceEachUnderBackPressure) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  if (IsSkipped()) return;
  constexpr uint32_t kPuts = 700;
  constexpr size_t kSlot = 24 * 1024;
  const auto target = fixture_->allocate(1, kPuts * kSlot);
  const RemoteKey key = at(1).registerMemory(target);
  const auto sizeOfPut = [](uint32_t i) { return (i * 397) % (kSlot - kHeaderBytes); };
  std::vector<std::vector<std::byte>> payloads;
  for (uint32_t i = 0; i < kPuts; ++i) payloads.push_back(pattern(sizeOfPut(i), i));
  for (uint32_t i = 0; i < kPuts; ++i) {
    const auto header = pattern(kHeaderBytes, ~i);  // freed right after the call
    ASSERT_NO_FATAL_FAILURE(put(0, 1, {key, i * kSlot}, i, header, payloads[i], 5000 + i));
  }
  ASSERT_TRUE(pollUntil([&] {
    return sinks_[1].puts.size() == kPuts && sinks_[0].done.size() == kPuts;
  })) << sinks_[1].puts.size()
      << " arrived, " << sinks_[0].done.size() << " done";
  for (uint32_t i = 0; i < kPuts; ++i) {
    ASSERT_EQ(sinks_[1].puts[i], 1);
    ASSERT_EQ(sinks_[0].done[5000 + i], 1);
    ASSERT_TRUE(slotHolds(target, i * kSlot, pattern(kHeaderBytes, ~i), payloads[i]))
        << "put " << i;
  }
}

TEST_P(TransportSuite, RoomIsBounded) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  if (IsSkipped()) return;
  const auto target = fixture_->allocate(1, 1 << 20);
  const RemoteKey key = at(1).registerMemory(target);
  const auto header = pattern(kHeaderBytes, 1);
  const auto payload = pattern(1024, 2);
  // There may be no room before there is a connection.
  ASSERT_NO_FATAL_FAILURE(put(0, 1, {key, 0}, 0, header, payload, 0));
  uint32_t accepted = 1;
  // Without a poll the sender must refuse at some point. It must not lose any message that it accepted.
  while (accepted < 1'000'000 &&
         at(0).put(peerOf_[0][1], {key, 0}, accepted, header, payload, accepted))
    ++accepted;
  EXPECT_LT(accepted, 1'000'000u);
  ASSERT_TRUE(pollUntil([&] {
    return sinks_[1].puts.size() == accepted && sinks_[0].done.size() == accepted;
  })) << sinks_[1].puts.size()
      << " of " << accepted;
}

TEST_P(TransportSuite, LargePutsCrossInBothDirections) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  if (IsSkipped()) return;
  constexpr uint32_t kPuts = 8;
  constexpr size_t kBytes = 1 << 20;
  constexpr size_t kSlot = kBytes + 4096;
  std::vector<std::span<std::byte>> targets;
  std::vector<RemoteKey> keys;
  for (int i : {0, 1}) {
    targets.push_back(fixture_->allocate(i, kPuts * kSlot));
    keys.push_back(at(i).registerMemory(targets.back()));
  }
  std::map<std::pair<int, uint32_t>, std::vector<std::byte>> payloads;
  for (uint32_t i = 0; i < kPuts; ++i) {
    for (int from : {0, 1}) {
      auto& payload = payloads[{from, i}] = pattern(kBytes, i + 100 * from);
      const auto header = pattern(kHeaderBytes, i);
      ASSERT_NO_FATAL_FAILURE(
          put(from, 1 - from, {keys[1 - from], i * kSlot}, i, header, payload, i));
      ASSERT_NO_FATAL_FAILURE(send(from, 1 - from, pattern(16, i)));
    }
  }
  ASSERT_TRUE(pollUntil([&] {
    return std::all_of(sinks_.begin(), sinks_.end(), [](const RecordingSink& sink) {
      return sink.puts.size() == kPuts && sink.done.size() == kPuts &&
             sink.controls.size() == kPuts;
    });
  }));
  for (const auto& [who, payload] : payloads) {
    EXPECT_TRUE(slotHolds(targets[1 - who.first], who.second * kSlot,
                          pattern(kHeaderBytes, who.second), payload));
  }
}

TEST_P(TransportSuite, ThreePeersAreToldApart) {
  ASSERT_NO_FATAL_FAILURE(start(3));
  if (IsSkipped()) return;
  constexpr size_t kSlot = 8192;
  std::vector<std::span<std::byte>> targets;
  std::vector<RemoteKey> keys;
  for (int i = 0; i < 3; ++i) {
    targets.push_back(fixture_->allocate(i, 3 * kSlot));
    keys.push_back(at(i).registerMemory(targets.back()));
  }
  std::vector<std::vector<std::byte>> payloads;
  for (uint32_t i = 0; i < 9; ++i) payloads.push_back(pattern(4000 + i, i));
  const auto header = pattern(kHeaderBytes, 5);
  for (int from = 0; from < 3; ++from) {
    for (int to = 0; to < 3; ++to) {
      if (from == to) continue;
      const auto pair = static_cast<uint32_t>(from * 3 + to);
      ASSERT_NO_FATAL_FAILURE(send(from, to, pattern(40, pair)));
      ASSERT_NO_FATAL_FAILURE(
          put(from, to, {keys[to], from * kSlot}, from, header, payloads[pair], pair));
    }
  }
  ASSERT_TRUE(pollUntil([&] {
    return std::all_of(sinks_.begin(), sinks_.end(), [](const RecordingSink& sink) {
      return sink.controls.size() == 2 && sink.puts.size() == 2 && sink.done.size() == 2;
    });
  }));
  for (int to = 0; to < 3; ++to) {
    for (int from = 0; from < 3; ++from) {
      if (from == to) continue;
      EXPECT_TRUE(slotHolds(targets[to], from * kSlot, header, payloads[from * 3 + to]));
      const auto wanted = std::make_pair(peerOf_[to][from], pattern(40, from * 3 + to));
      EXPECT_EQ(std::count(sinks_[to].controls.begin(), sinks_[to].controls.end(), wanted), 1);
    }
  }
}

TEST_P(TransportSuite, PayloadMayBeOverwrittenOncePutIsDone) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  if (IsSkipped()) return;
  constexpr uint32_t kPuts = 12;
  constexpr size_t kSlot = 512 * 1024;
  const auto target = fixture_->allocate(1, kPuts * kSlot);
  const RemoteKey key = at(1).registerMemory(target);
  std::vector<std::vector<std::byte>> payloads;
  for (uint32_t i = 0; i < kPuts; ++i) payloads.push_back(pattern(i * 40'000 + 1, i));
  // Overwrite the payload at the earliest moment that the contract allows.
  sinks_[0].whenDone = [&](uint64_t token) {
    std::fill(payloads[token].begin(), payloads[token].end(), std::byte{0xee});
  };
  const auto header = pattern(kHeaderBytes, 9);
  for (uint32_t i = 0; i < kPuts; ++i)
    ASSERT_NO_FATAL_FAILURE(put(0, 1, {key, i * kSlot}, i, header, payloads[i], i));
  ASSERT_TRUE(
      pollUntil([&] { return sinks_[1].puts.size() == kPuts && sinks_[0].done.size() == kPuts; }));
  for (uint32_t i = 0; i < kPuts; ++i)
    EXPECT_TRUE(slotHolds(target, i * kSlot, header, pattern(i * 40'000 + 1, i))) << "put " << i;
}

TEST_P(TransportSuite, WaitDescriptorWakes) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  if (IsSkipped()) return;
  if (at(1).waitDescriptor() < 0)
    GTEST_SKIP() << "no descriptor: the caller looks from time to time";
  // Make a round trip first, because the set-up of a connection has events of its own.
  for (int from : {0, 1}) ASSERT_NO_FATAL_FAILURE(send(from, 1 - from, pattern(8, 1)));
  ASSERT_TRUE(
      pollUntil([&] { return sinks_[0].controls.size() == 1 && sinks_[1].controls.size() == 1; }));
  const auto readable = [&](int milliseconds) {
    pollfd wait{at(1).waitDescriptor(), POLLIN, 0};
    return ::poll(&wait, 1, milliseconds) == 1;
  };
  ASSERT_TRUE(pollUntil([&] { return at(1).prepareWait() && !readable(0); })) << "never falls idle";

  ASSERT_NO_FATAL_FAILURE([&] { ASSERT_TRUE(at(0).control(peerOf_[0][1], pattern(8, 2))); }());
  const Deadline deadline = Deadline::after(clock_, kDeadline);
  while (sinks_[1].controls.size() < 2 && !deadline.passed(clock_)) {
    fixture_->advance();
    at(0).poll(sinks_[0]);
    // The receiver polls only when it is told to.
    if (!at(1).prepareWait() || readable(20)) at(1).poll(sinks_[1]);
  }
  ASSERT_EQ(sinks_[1].controls.size(), 2u) << "slept through a message";
  EXPECT_EQ(sinks_[1].controls[1].second, pattern(8, 2));
}

TEST_P(TransportSuite, DestroyingWithWorkInFlightNeitherHangsNorHurtsTheOthers) {
  ASSERT_NO_FATAL_FAILURE(start(3));
  if (IsSkipped()) return;
  if (!fixture_->survivesDestruction()) GTEST_SKIP() << "this kind does not survive it";
  const auto target = fixture_->allocate(1, 8 << 20);
  const RemoteKey key = at(1).registerMemory(target);
  const auto header = pattern(kHeaderBytes, 1);
  const auto payload = pattern(4 << 20, 2);
  for (uint32_t i = 0; i < 4; ++i)
    ASSERT_NO_FATAL_FAILURE(put(0, 1, {key, 0}, i, header, payload, i));
  for (int i = 0; i < 3; ++i) {
    ASSERT_NO_FATAL_FAILURE(send(0, 1, pattern(64, i)));
    ASSERT_NO_FATAL_FAILURE(send(1, 0, pattern(64, i)));
  }
  alive_[0] = false;
  fixture_->destroy(0);
  ASSERT_NO_FATAL_FAILURE(send(2, 1, pattern(32, 6)));
  const auto wanted = std::make_pair(peerOf_[1][2], pattern(32, 6));
  EXPECT_TRUE(pollUntil([&] {
    return std::count(sinks_[1].controls.begin(), sinks_[1].controls.end(), wanted) == 1;
  }));
}

}  // namespace smddp::transport::testing
