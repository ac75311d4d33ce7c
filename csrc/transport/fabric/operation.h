// What is under way between us and the provider.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/fabric/fid.h"
#include "transport/fabric/memory.h"
#include "transport/transport.h"

namespace smddp::transport::fabric {

// A put that was accepted. Lives until the provider has let go of all its bytes.
struct OutgoingPut {
  PeerId peer = -1;
  RemoteSlot slot;
  uint32_t immediate = 0;
  uint64_t token = 0;
  uint64_t number = 0;  // tells the puts of this process apart
  std::array<std::byte, kHeaderBytes> header{};
  Bytes payload;               // the caller's bytes, or their copy in `bounce`
  void* descriptor = nullptr;  // of payload
  BouncePool::Buffer bounce;   // null unless the provider could not take the caller's bytes
  bool headerInBounce = false;
  bool inTwo = false;   // header and payload leave as two writes
  uint64_t posted = 0;  // bytes of header and payload handed to the provider
  int inFlight = 0;     // operations of this put that it still has

  uint64_t totalBytes() const { return kHeaderBytes + payload.size(); }
};

// One send, write or receive. The provider owns it from posting to completion.
struct Operation {
  enum class Kind : uint8_t { Receive, Control, Put };

  fi_context2 context{};  // the provider's scratch memory; must come first
  Kind kind = Kind::Receive;
  bool posted = false;        // the provider has it
  PeerId peer = -1;           // of Control and Put
  std::byte* slot = nullptr;  // registered memory of this operation
  void* slotDescriptor = nullptr;
  std::shared_ptr<OutgoingPut> put;  // of Put
};

}  // namespace smddp::transport::fabric
