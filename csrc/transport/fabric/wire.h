// The layout of messages and addresses. All hosts of a job have the same byte order.
//
// The bytes come from peers: sizes and kinds are checked before use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "transport/fabric/provider.h"
#include "transport/transport.h"

namespace smddp::transport::fabric {

// The lowest byte is the version of the protocol.
enum class MessageKind : uint32_t { Control = 0x73634302, Fragment = 0x73634602 };

// `proof` in a header shows that the sender has the job's token: it is a MAC, under the token, of the ids of the sender
// and of the receiver. It is the same in all messages between the two, so it stops whoever can reach our port, but not
// whoever can read the network. 0 without a token.

// The header of a control message. The messages of a sender are numbered from 0, because fabrics reorder them.
struct FabricControlHeader {
  MessageKind kind;
  uint32_t unused;
  uint64_t sender;
  uint64_t proof;
  uint64_t sequence;
};

// The header of a fragment of a put, if puts are made of sends. The fragments of a put may arrive in any order.
struct FragmentHeader {
  MessageKind kind;
  uint32_t immediate;
  uint64_t sender;
  uint64_t proof;
  uint64_t number;  // of the put, at the sender
  RemoteSlot slot;
  uint64_t totalBytes;  // header and payload of the whole put
  uint64_t offset;      // of this fragment, from the beginning of the slot
};

static_assert(sizeof(FabricControlHeader) == 32 && sizeof(FragmentHeader) == 72);

// Reads the struct at the beginning of `message`; nullopt if that is too short.
template <typename T>
std::optional<T> readStruct(Bytes message) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (message.size() < sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, message.data(), sizeof(T));
  return value;
}

// The contents of Transport::address().
struct Address {
  uint64_t id = 0;  // random; names the process in its messages
  Protocol protocol = Protocol::Write;
  std::string provider;
  std::vector<std::byte> name;  // fi_getname
};

std::vector<std::byte> encode(const Address& address);
// Throws Transport if the bytes are not an address of this version.
Address decodeAddress(Bytes bytes);

}  // namespace smddp::transport::fabric
