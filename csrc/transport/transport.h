// A Transport moves bytes between two processes. The engine uses this interface over shared memory, a fabric or the
// simulator.
//
// There are two calls. control() carries small messages to the peer's Sink, in order per peer. put() writes one
// message, with a header, into a slot of the receiver's memory, and passes an immediate value that the receiver's
// poll() reports when all bytes are visible. The receiver tells the sender with control messages where its slots lie
// and which of them are free (transport/channel.h).
//
// Puts may arrive in any order, also relative to control messages.
//
// Threads: only the thread that owns the engine at that time calls. Nothing here blocks.
// Ownership: the caller keeps payload bytes untouched until onPutDone(token). Registered memory, target or source,
// keeps its mapping and its pages until the transport is destroyed. A network card knows physical pages, and would
// go on writing to pages that were given back. Destroying a transport cancels what is in flight.
// Errors: after an exception the transport is unusable. A failure of one peer is reported by onPeerFailed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/types.h"

namespace smddp::transport {

// The number of a peer: a process that was passed to connect(), which returns the number. From 0 on, without gaps.
using PeerId = int32_t;

using Bytes = std::span<const std::byte>;

// The longest control message.
inline constexpr size_t kMaxControlBytes = 1024;
// The size of the header in front of every put's payload; wire.h has its fields. It is a cache line, so that payloads
// in slots begin at a cache line. A payload that begins elsewhere, at other offsets in a page than its copy, is copied
// at half the speed.
inline constexpr size_t kHeaderBytes = 64;
// The greatest immediate value. The transport uses the 32nd bit itself.
inline constexpr uint32_t kMaxImmediate = 0x7FFFFFFF;

// A peer's puts name our memory by this key. Only the transport that made it can interpret it.
struct RemoteKey {
  uint64_t address = 0;
  uint64_t key = 0;
  friend bool operator==(const RemoteKey&, const RemoteKey&) = default;
};

// Where a put goes: `offset` bytes into `target`, which is registered memory of the peer, usually a window. The header
// comes first, then the payload.
struct RemoteSlot {
  RemoteKey target;
  uint64_t offset = 0;
};

// The bytes of a put. If `onDevice`, they lie in memory that was added with addDeviceSource(); the host must not read
// them.
struct Payload : Bytes {
  using Bytes::Bytes;
  Payload() = default;
  Payload(Bytes bytes, bool isOnDevice = false) : Bytes(bytes), onDevice(isOnDevice) {}
  bool onDevice = false;
};

// Memory of a device, which the host must not read at its addresses.
struct DeviceMemory {
  // Host: the memory of a fake device for tests, which is memory of the host.
  enum class Kind : uint8_t { Host, Cuda };
  std::span<std::byte> bytes;
  Kind kind = Kind::Host;
  int32_t device = 0;
};

// Receives the events that poll() finds. Called on the thread that polls; must not call poll().
class Sink {
 public:
  virtual ~Sink() = default;
  // `message` is valid during the call only.
  virtual void onControl(PeerId from, Bytes message) = 0;
  // All bytes of a put with this immediate value are in our memory.
  virtual void onPut(uint32_t immediate) = 0;
  // The payload of a put begins to arrive. Returns the memory of that length where it belongs; empty: it goes to its
  // slot, behind the header. Asked only by a transport that implements withdraw(), and only once for each put.
  virtual std::span<std::byte> placeFor(PeerId /*from*/, uint32_t /*immediate*/,
                                        size_t /*payloadBytes*/) {
    return {};
  }
  // The payload of put(…, token) may be overwritten.
  virtual void onPutDone(uint64_t token) = 0;
  // No further message will arrive from this peer. Called once per peer. `cause` does not name the peer; the caller
  // does.
  virtual void onPeerFailed(PeerId peer, const std::string& cause) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // A peer passes this to its connect(). Opaque, at most 512 bytes.
  virtual std::vector<std::byte> address() const = 0;
  // Introduces a peer by its address(). Returns at once; the connection may be made later.
  virtual PeerId connect(Bytes address, const std::string& description) = 0;

  // Makes memory a target of puts. The same memory gets the same key again.
  virtual RemoteKey registerMemory(std::span<std::byte> memory) = 0;
  // Announces that many payloads will lie in `memory`. True: it is registered now, so these puts need no copy. False:
  // this transport needs no registration, or has no room for another one.
  virtual bool addSource(std::span<std::byte> /*memory*/) { return false; }
  // Allows payloads in this memory of a device. Returns an empty text, or, if the network cannot read memory of any
  // device, the reason for the user. Throws Resource if it cannot read this memory only. The caller must remove the
  // memory when it has been freed: a new allocation at the same addresses has other pages.
  virtual std::string addDeviceSource(const DeviceMemory&) {
    return "only memory of the host can be sent here";
  }
  virtual void removeDeviceSource(std::span<std::byte> /*memory*/) {}

  // Sends a control message. False: no room now; poll() and try again.
  [[nodiscard]] virtual bool control(PeerId peer, Bytes message) = 0;
  // Writes header (kHeaderBytes, copied during the call) and payload to the peer's slot. The peer's poll() then reports
  // `immediate`; no two puts in flight to one peer may have the same. False: no room now; poll() and try again.
  [[nodiscard]] virtual bool put(PeerId peer, const RemoteSlot& slot, uint32_t immediate,
                                 Bytes header, Payload payload, uint64_t token) = 0;

  // Writes nothing to this memory any more, which placeFor() has returned: what is arriving there goes on to its slot.
  virtual void withdraw(std::span<std::byte> /*memory*/) {}

  // Whether the peer's host has all that was sent to it. What is still under way when this process closes its
  // connections may get lost.
  virtual bool isDelivered(PeerId /*peer*/) const { return true; }

  // Makes progress and reports events to the sink. Returns their number.
  virtual size_t poll(Sink& sink) = 0;

  // A descriptor that becomes readable when poll() has something to do. -1: there is none, and the caller must poll
  // from time to time. Sleep on it only right after prepareWait() has returned true.
  virtual int waitDescriptor() const { return -1; }
  virtual bool prepareWait() { return true; }

  // One line for the log that says what was chosen, and why.
  virtual std::string describe() const = 0;
};

}  // namespace smddp::transport
