// The byte layouts that channels use: the header of a put, their control messages and the 32-bit immediate value. They
// are little-endian and have no padding. All ranks of a job run the same version.
//
// Parsers do not trust their input. They check the length before they read, and every value that is later used as an
// index or a size. For unknown or malformed input they return nullopt; they never throw.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <vector>

#include "common/types.h"
#include "transport/transport.h"

namespace smddp::transport {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian");

inline constexpr uint8_t kWireVersion = 3;

// The parts of a call that must be equal on all ranks. The engine fills it in and compares it with its own; the
// transport does not interpret it.
//
//   byte  0            1       2      3       4              8                                16
//         | collective | dtype | op   | flags | root         | bytes                          |
struct CallFingerprint {
  uint8_t collective = 0;
  uint8_t dtype = 0;
  uint8_t op = 0;
  uint8_t flags = 0;  // engine::calls::PartOf
  int32_t root = -1;
  uint64_t bytes = 0;
  friend bool operator==(const CallFingerprint&, const CallFingerprint&) = default;
};
static_assert(sizeof(CallFingerprint) == 16 && std::is_trivially_copyable_v<CallFingerprint>);

// The bytes "SMD" and the version, in this order in memory.
inline constexpr uint32_t kPutMagic = 0x00444D53u | (uint32_t{kWireVersion} << 24);

// The header in front of the payload in every slot.
//
//   byte  0               4               8                               16
//         | magic+version | length        | group                         |
//        16                               24                              32
//         | number                        | collective…, root             |
//        32                               40                              48
//         | bytes                         | reserved                      |
//        48                                                              64
//         | reserved                                                      |
struct PutHeader {
  uint32_t magic = kPutMagic;
  uint32_t length = 0;  // of the payload
  uint64_t group = 0;
  uint64_t number = 0;  // of the message on its channel, from 1
  CallFingerprint call;
  uint64_t reserved[3] = {};
};
static_assert(sizeof(PutHeader) == kHeaderBytes && std::is_trivially_copyable_v<PutHeader>);
static_assert(std::has_unique_object_representations_v<PutHeader>);

// Kinds below kFirstEngineKind belong to the channels, the others to the engine (engine/calls/control_kind.h).
enum class ControlKind : uint8_t { Open = 1, Grant = 2, Close = 3, Abort = 4 };
inline constexpr uint8_t kFirstEngineKind = 64;

// The header of every control message.
//
//   byte  0      1         2         4               8
//         | kind | version | channel | tailBytes     |
struct ControlHeader {
  uint8_t kind = 0;
  uint8_t version = kWireVersion;
  uint16_t channel = 0;    // the receiver's channel id; unused by Abort
  uint32_t tailBytes = 0;  // the number of bytes after the fixed part
};
static_assert(sizeof(ControlHeader) == 8 && std::is_trivially_copyable_v<ControlHeader>);

// Receiver to sender: the channel's window lies in this registered memory, from its first byte on.
//
//   byte  0               8               16              20              24
//         | header        | group         | source        | destination   |
//        24      25           26         28       32          40
//         | track | subchannel | reserved | window | slotBytes |
//        40               48              56
//         | target.address | target.key   |
struct OpenMessage {
  ControlHeader header{.kind = static_cast<uint8_t>(ControlKind::Open)};
  uint64_t group = 0;
  Rank source = 0;
  Rank destination = 0;
  uint8_t track = 0;
  uint8_t subchannel = 0;
  uint16_t reserved = 0;
  uint32_t window = 0;     // slots
  uint64_t slotBytes = 0;  // longest payload
  RemoteKey target;
};
static_assert(sizeof(OpenMessage) == 56 && std::is_trivially_copyable_v<OpenMessage>);
static_assert(std::has_unique_object_representations_v<OpenMessage>);

// Receiver to sender: the slots of the first `released` messages are free again.
//
//   byte  0               8               16              24
//         | header        | group         | released      |
struct GrantMessage {
  ControlHeader header{.kind = static_cast<uint8_t>(ControlKind::Grant)};
  uint64_t group = 0;
  uint64_t released = 0;
};
static_assert(sizeof(GrantMessage) == 24 && std::is_trivially_copyable_v<GrantMessage>);

// Sender to receiver: the channel is closed after `sent` messages. When they have arrived, its id is free.
//
//   byte  0               8               16              24
//         | header        | group         | sent          |
struct CloseMessage {
  ControlHeader header{.kind = static_cast<uint8_t>(ControlKind::Close)};
  uint64_t group = 0;
  uint64_t sent = 0;
};
static_assert(sizeof(CloseMessage) == 24 && std::is_trivially_copyable_v<CloseMessage>);

// To every peer: this group is broken from operation `from` on. The text of tailBytes bytes says why.
//
//   byte  0               8               16              24
//         | header        | group         | from          | text …
struct AbortMessage {
  ControlHeader header{.kind = static_cast<uint8_t>(ControlKind::Abort)};
  uint64_t group = 0;
  uint64_t from = 0;
};
static_assert(sizeof(AbortMessage) == 24 && std::is_trivially_copyable_v<AbortMessage>);

// `text` points into the parsed message.
struct ParsedAbort {
  uint64_t group = 0;
  uint64_t from = 0;
  std::string_view text;
};

// An immediate value has this many low bits of a message's number. A window must be well below half their range, so
// that the number can be recovered (numberOf).
inline constexpr int kNumberBits = 15;
inline constexpr uint32_t kMaxWindow = 1u << (kNumberBits - 2);
// The longest payload of one message.
inline constexpr uint64_t kMaxSlotBytes = uint64_t{1} << 31;

// Parses the header of any kind of control message. nullopt if its version is not ours.
std::optional<ControlHeader> parseControlHeader(Bytes message);
std::optional<OpenMessage> parseOpen(Bytes message);
std::optional<GrantMessage> parseGrant(Bytes message);
std::optional<CloseMessage> parseClose(Bytes message);
std::optional<ParsedAbort> parseAbort(Bytes message);

// Makes an Abort. Cuts the text so that it fits into a control message.
std::vector<std::byte> makeAbort(uint64_t group, uint64_t from, std::string_view text);

// The bytes of one of the structures above.
template <typename T>
Bytes bytesOf(const T& message) {
  static_assert(std::is_trivially_copyable_v<T>);
  return std::as_bytes(std::span<const T, 1>(&message, 1));
}

// For a peer's address that this rank's transport between nodes cannot read. Throws Transport.
[[noreturn]] void raiseOtherNetwork(std::string_view ours);

// An immediate value: bits 30 … 15 have the receiver's channel id, bits 14 … 0 the low bits of the message's number.
constexpr uint32_t makeImmediate(uint16_t channel, uint64_t number) {
  constexpr uint32_t kMask = (1u << kNumberBits) - 1;
  return uint32_t{channel} << kNumberBits | (static_cast<uint32_t>(number) & kMask);
}
static_assert(makeImmediate(0xFFFF, ~0ull) == kMaxImmediate);
constexpr uint16_t channelOf(uint32_t immediate) {
  return static_cast<uint16_t>(immediate >> kNumberBits);
}
// The number with these low bits that is nearest to `near`; 0 if that would be below 1. Example: the low bits are 2,
// and `near` is 32767 = 2^15 - 1. The result is 32770 = 2^15 + 2, not 2.
constexpr uint64_t numberOf(uint32_t immediate, uint64_t near) {
  constexpr int kAbove = 64 - kNumberBits;
  const auto distance = static_cast<int64_t>((immediate - near) << kAbove) >> kAbove;
  return distance < 0 && near < static_cast<uint64_t>(-distance) ? 0 : near + distance;
}

}  // namespace smddp::transport
