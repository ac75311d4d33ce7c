#include "transport/wire.h"

#include <cstring>
#include <string>

#include <gtest/gtest.h>

#include "transport/sim/random.h"

namespace smddp::transport {
namespace {

std::vector<std::byte> copyOf(Bytes bytes) { return {bytes.begin(), bytes.end()}; }

OpenMessage someOpen() {
  OpenMessage open;
  open.header.channel = 513;
  open.group = 0x1122334455667788;
  open.source = 3;
  open.destination = 5;
  open.track = 2;
  open.subchannel = 1;
  open.window = 4;
  open.slotBytes = 262144;
  open.target = {0xAABB, 0xCCDD};
  return open;
}

// Other processes rely on the layout, so it is checked byte by byte and not through the structure.
TEST(Wire, PutHeaderLayout) {
  PutHeader header;
  header.length = 0x04030201;
  header.group = 0x18;
  header.number = 0x28;
  header.call = {7, 6, 5, 4, -2, 0x38};
  const auto bytes = copyOf(bytesOf(header));
  ASSERT_EQ(bytes.size(), 64u);
  EXPECT_EQ(std::memcmp(bytes.data(), "SMD\x03\x01\x02\x03\x04\x18", 9), 0);
  EXPECT_EQ(bytes[16], std::byte{0x28});
  EXPECT_EQ(std::memcmp(&bytes[24], "\x07\x06\x05\x04\xFE\xFF\xFF\xFF\x38", 9), 0);
  for (size_t i = 40; i < 64; ++i) EXPECT_EQ(bytes[i], std::byte{0}) << i;
}

TEST(Wire, OpenLayout) {
  const auto bytes = copyOf(bytesOf(someOpen()));
  ASSERT_EQ(bytes.size(), 56u);
  EXPECT_EQ(
      std::memcmp(bytes.data(), "\x01\x03\x01\x02\0\0\0\0\x88\x77\x66\x55\x44\x33\x22\x11", 16), 0);
  EXPECT_EQ(std::memcmp(&bytes[16], "\x03\0\0\0\x05\0\0\0\x02\x01\0\0\x04\0\0\0", 16), 0);
  EXPECT_EQ(std::memcmp(&bytes[32], "\0\0\x04\0\0\0\0\0\xBB\xAA", 10), 0);
  EXPECT_EQ(std::memcmp(&bytes[48], "\xDD\xCC\0\0\0\0\0\0", 8), 0);
}

TEST(Wire, ControlMessagesSurviveTheTrip) {
  const auto open = parseOpen(bytesOf(someOpen()));
  ASSERT_TRUE(open);
  EXPECT_EQ(copyOf(bytesOf(*open)), copyOf(bytesOf(someOpen())));

  GrantMessage grant;
  grant.header.channel = 9;
  grant.group = 8;
  grant.released = 7;
  ASSERT_TRUE(parseGrant(bytesOf(grant)));
  EXPECT_EQ(copyOf(bytesOf(*parseGrant(bytesOf(grant)))), copyOf(bytesOf(grant)));

  CloseMessage close;
  close.group = 6;
  close.sent = 5;
  ASSERT_TRUE(parseClose(bytesOf(close)));
  EXPECT_EQ(parseClose(bytesOf(close))->sent, 5u);
}

TEST(Wire, AbortCarriesItsTextCutToSize) {
  const auto message = makeAbort(77, 5, "rank 3 died");
  const auto abort = parseAbort(message);
  ASSERT_TRUE(abort);
  EXPECT_EQ(abort->group, 77u);
  EXPECT_EQ(abort->text, "rank 3 died");

  const auto longest = makeAbort(1, 1, std::string(5000, 'x'));
  EXPECT_EQ(longest.size(), kMaxControlBytes);
  ASSERT_TRUE(parseAbort(longest));
  EXPECT_EQ(parseAbort(longest)->text, std::string(kMaxControlBytes - sizeof(AbortMessage), 'x'));
}

TEST(Wire, EveryTruncationAndExtensionIsRefused) {
  const auto whole = copyOf(bytesOf(someOpen()));
  for (size_t n = 0; n < whole.size(); ++n) {
    EXPECT_FALSE(parseOpen(Bytes(whole).first(n))) << n << " bytes";
  }
  auto longer = whole;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(parseOpen(longer));
  EXPECT_FALSE(parseAbort(Bytes(makeAbort(1, 1, "text")).first(26)));
}

TEST(Wire, ValuesThatWouldBeUsedAsSizesAreChecked) {
  const auto refused = [](auto change) {
    OpenMessage open = someOpen();
    change(open);
    return !parseOpen(bytesOf(open));
  };
  EXPECT_TRUE(refused([](OpenMessage& m) { m.window = 0; }));
  EXPECT_TRUE(refused([](OpenMessage& m) { m.window = kMaxWindow + 1; }));
  EXPECT_TRUE(refused([](OpenMessage& m) { m.slotBytes = kMaxSlotBytes + 1; }));
  // The sender of a long message would never come to its end.
  EXPECT_TRUE(refused([](OpenMessage& m) { m.slotBytes = 0; }));
  EXPECT_TRUE(refused([](OpenMessage& m) { m.source = -1; }));
  EXPECT_TRUE(refused([](OpenMessage& m) { m.destination = -1; }));
  EXPECT_TRUE(refused([](OpenMessage& m) { m.reserved = 1; }));
  EXPECT_TRUE(refused([](OpenMessage& m) { m.header.version = kWireVersion + 1; }));
  EXPECT_TRUE(refused([](OpenMessage& m) { m.header.kind = 2; }));
  EXPECT_TRUE(refused([](OpenMessage& m) { m.header.tailBytes = 1; }));
  EXPECT_FALSE(refused([](OpenMessage&) {}));
}

// An accepted message has the expected kind, and the parser stays inside the message (ASan checks that).
TEST(Wire, RandomBytesNeverDoHarm) {
  sim::Random random(20260101);
  int accepted = 0;
  for (int i = 0; i < 200'000; ++i) {
    std::vector<std::byte> message(static_cast<size_t>(random.between(0, 80)));
    for (auto& b : message) b = static_cast<std::byte>(random.chance(0.5) ? 0 : random.next());
    // Mostly plausible headers: purely random ones would all fail at the first byte.
    if (message.size() > 8 && random.chance(0.9)) {
      message[0] = static_cast<std::byte>(random.between(0, 5));
      message[1] = std::byte{kWireVersion};
      std::memset(&message[4], 0, 4);
      if (random.chance(0.5))
        message[4] = static_cast<std::byte>(message.size() - sizeof(AbortMessage));
    }
    SCOPED_TRACE(i);
    if (const auto m = parseOpen(message)) {
      ASSERT_TRUE(m->window >= 1 && m->window <= kMaxWindow && m->slotBytes <= kMaxSlotBytes);
      ASSERT_EQ(message.size(), sizeof(OpenMessage));
    }
    accepted += parseGrant(message).has_value() + parseClose(message).has_value();
    if (const auto m = parseAbort(message)) {
      ASSERT_EQ(m->text.size() + sizeof(AbortMessage), message.size());
      ++accepted;
    }
  }
  EXPECT_GT(accepted, 1000);
}

TEST(Wire, ImmediateNamesChannelAndNearestNumber) {
  EXPECT_EQ(channelOf(makeImmediate(0xFFFE, 3)), 0xFFFE);
  for (const uint64_t near :
       {0ull, 1ull, 32767ull, 32768ull, 65535ull, 65536ull, 1ull << 40, (1ull << 40) + 65530}) {
    for (int64_t distance = -int64_t{kMaxWindow}; distance <= int64_t{kMaxWindow};
         distance += 127) {
      if (distance < 0 && near < static_cast<uint64_t>(-distance)) continue;
      const uint64_t number = near + static_cast<uint64_t>(distance);
      ASSERT_EQ(numberOf(makeImmediate(1, number), near), number) << near << " " << distance;
    }
  }
  EXPECT_EQ(numberOf(makeImmediate(1, 32767), 5), 0u) << "a number below 1";
}

}  // namespace
}  // namespace smddp::transport
