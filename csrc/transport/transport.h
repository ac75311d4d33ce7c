// Moving bytes between two processes: what the engine asks of shared memory, a fabric or the simulator.
//
// Three verbs. control() carries small messages to the peer's Sink, in order per peer. grant() is a control
// message by convention (transport/channel.h): the receiver tells where a window of slots lies and how many were
// consumed. put() writes one message into such a slot, together with a header and an immediate value that the
// receiver's poll() reports once all its bytes are visible.
//
// Nothing is assumed about the order of puts among one another or against control messages.
//
// Threads: all calls come from the one thread that owns the engine at that time. Nothing here blocks.
// Ownership: the caller keeps payload bytes untouched until onPutDone(token). Registered memory, target or source,
// keeps its mapping and its pages until the transport is destroyed: a network card goes by the pages, and would write
// to those that were given back. Destroying a transport cancels what is in flight.
// Errors: an exception means the transport is unusable; trouble with one peer is reported by onPeerFailed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/types.h"

namespace smddp::transport {

// A process this transport has been introduced to; small, dense, given by connect().
using PeerId = int32_t;

using Bytes = std::span<const std::byte>;

// Longest control message.
inline constexpr size_t kMaxControlBytes = 1024;
// Bytes of the header in front of every put's payload (wire.h gives it its fields). A cache line: a payload
// that begins beside one, a few bytes before where its copy does in a page, is copied at half the speed.
inline constexpr size_t kHeaderBytes = 64;
// Greatest immediate value: one bit is the transport's own.
inline constexpr uint32_t kMaxImmediate = 0x7FFFFFFF;

// How a peer names memory of ours in its puts. Opaque to everyone but the transport that made it.
struct RemoteKey {
  uint64_t address = 0;
  uint64_t key = 0;
  friend bool operator==(const RemoteKey&, const RemoteKey&) = default;
};

// Where a put lands: `key` of the peer's region, `offset` bytes into it. The header comes first, then the payload.
struct RemoteSlot {
  RemoteKey region;
  uint64_t offset = 0;
};

// What a put carries. On a device it is memory that was added as a source there, which the host must not read.
struct Payload : Bytes {
  using Bytes::Bytes;
  Payload() = default;
  Payload(Bytes bytes, bool isOnDevice = false) : Bytes(bytes), onDevice(isOnDevice) {}
  bool onDevice = false;
};

// Memory of a device, which the host must not read at its addresses.
struct DeviceMemory {
  // Host: of a device made up for tests, whose memory is the host's.
  enum class Kind : uint8_t { Host, Cuda };
  std::span<std::byte> bytes;
  Kind kind = Kind::Host;
  int32_t device = 0;
};

// Receives what poll() finds. Called on the thread that polls; must not call back into poll().
class Sink {
 public:
  virtual ~Sink() = default;
  // `message` is valid during the call only.
  virtual void onControl(PeerId from, Bytes message) = 0;
  // A put with this immediate value is complete in our memory.
  virtual void onPut(uint32_t immediate) = 0;
  // The payload of put(…, token) may be overwritten.
  virtual void onPutDone(uint64_t token) = 0;
  // No further message will arrive from this peer; said once. `cause` leaves naming it to the caller.
  virtual void onPeerFailed(PeerId peer, const std::string& cause) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // What a peer needs in order to connect() to us: opaque bytes, at most 512.
  virtual std::vector<std::byte> address() const = 0;
  // Introduces a peer by its address(). Returns at once; a connection may come about later.
  virtual PeerId connect(Bytes address, const std::string& description) = 0;

  // Makes memory a target of puts. The same memory gets the same key again.
  virtual RemoteKey registerMemory(std::span<std::byte> memory) = 0;
  // Puts whose payload lies in `memory` will come often. True: it is registered now, and they leave without a copy;
  // false: that takes no registration here, or there is no room for one.
  virtual bool addSource(std::span<std::byte> /*memory*/) { return false; }
  // Payloads of puts may lie in this memory of a device from now on. Returns why the network reads none of any device, for
  // the user; throws Resource where it is only this memory that it cannot read. It stays registered until it is removed,
  // which has to be done when it has been freed: what another allocation at its addresses has is not what would be read.
  virtual std::string addDeviceSource(const DeviceMemory&) {
    return "only memory of the host can be sent here";
  }
  virtual void removeDeviceSource(std::span<std::byte> /*memory*/) {}

  // False: no room now; poll() and try again.
  [[nodiscard]] virtual bool control(PeerId peer, Bytes message) = 0;
  // Header (kHeaderBytes, copied during the call) and payload to the peer's slot; its poll() then reports
  // `immediate`, which no other put to that peer has that may still be under way. False: no room now; poll() and
  // try again.
  [[nodiscard]] virtual bool put(PeerId peer, const RemoteSlot& slot, uint32_t immediate,
                                 Bytes header, Payload payload, uint64_t token) = 0;

  // Makes progress and reports what happened. Returns how many events there were.
  virtual size_t poll(Sink& sink) = 0;

  // A descriptor that becomes readable when poll() has something to do, or -1 when there is none and the
  // caller must look from time to time. Sleep on it only right after prepareWait() returned true.
  virtual int waitDescriptor() const { return -1; }
  virtual bool prepareWait() { return true; }

  // One line for the log: what was chosen and why.
  virtual std::string describe() const = 0;
};

}  // namespace smddp::transport
