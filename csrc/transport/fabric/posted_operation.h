// The operations in flight between us and the provider.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/fabric/fid.h"
#include "transport/fabric/memory.h"
#include "transport/transport.h"

namespace smddp::transport::fabric {

// A put that was accepted. It lives until all its operations have completed.
struct OutgoingPut {
  PeerId peer = -1;
  RemoteSlot slot;
  uint32_t immediate = 0;
  uint64_t token = 0;
  uint64_t number = 0;  // different for each put of this process
  std::array<std::byte, kHeaderBytes> header{};
  Bytes payload;               // the caller's bytes, or their copy in `bounce`
  void* descriptor = nullptr;  // of payload
  BouncePool::Buffer bounce;   // null if the provider takes the caller's bytes in place
  bool headerInBounce = false;
  bool twoWrites = false;  // header and payload are two writes
  uint64_t posted = 0;     // bytes of header and payload that were posted
  int inFlight = 0;        // operations of this put that have not completed

  uint64_t totalBytes() const { return kHeaderBytes + payload.size(); }
};

// One send, write or receive. The provider owns it from the post to the completion.
struct PostedOperation {
  enum class Kind : uint8_t { Receive, Control, Put };

  fi_context2 context{};  // the provider's scratch memory; must come first
  Kind kind = Kind::Receive;
  bool posted = false;        // the provider owns it
  PeerId peer = -1;           // of Control and Put
  std::byte* slot = nullptr;  // registered memory of this operation
  void* slotDescriptor = nullptr;
  std::shared_ptr<OutgoingPut> put;  // of Put
};

}  // namespace smddp::transport::fabric
