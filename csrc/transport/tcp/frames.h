// The bytes on a connection between two processes. All hosts of a job have the same byte order.
//
// Whoever opens a connection begins with a Hello. From then on both ends send frames: a header, and its bytes. The
// bytes come from peers, so sizes and kinds are checked before use.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace smddp::transport::tcp {

// The lowest byte is the version of the protocol.
inline constexpr uint32_t kMagic = 0x73745001;

// `proof` shows that the sender has the job's token: it is a MAC, under the token, of the ids of sender and receiver.
// 0 without a token.
struct Hello {
  uint32_t magic = kMagic;
  uint32_t unused = 0;
  uint64_t sender = 0;
  uint64_t receiver = 0;
  uint64_t proof = 0;
};

enum class FrameKind : uint32_t {
  Control,  // a control message of `length` bytes
  Put,      // a put, header and payload, of `length` bytes
};

struct FrameHeader {
  FrameKind kind = FrameKind::Control;
  uint32_t immediate = 0;  // Put
  uint64_t length = 0;
  RemoteSlot slot;  // Put
};

static_assert(sizeof(Hello) == 32 && sizeof(FrameHeader) == 40);

// The contents of Transport::address().
struct Address {
  uint64_t id = 0;   // random; names the process
  std::string host;  // a numeric IPv4 or IPv6 address
  uint16_t port = 0;
};

// Where a put goes, in memory that was registered with the keys 1, 2, …; empty if it leaves that memory.
std::span<std::byte> placeIn(std::span<const std::span<std::byte>> regions,
                             const FrameHeader& frame);

std::vector<std::byte> encode(const Address& address);
// Throws Transport if the bytes are not an address of this version.
Address decodeAddress(Bytes bytes);

}  // namespace smddp::transport::tcp
