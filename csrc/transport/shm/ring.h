// A ring: a queue of records from one process to another, in the receiver's slab.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "transport/shm/segment.h"
#include "transport/transport.h"

namespace smddp::transport::shm {

enum class RecordKind : uint32_t { Control = 1, Put = 2 };

// The header in front of every record's bytes.
struct RecordHeader {
  RecordKind kind;
  uint32_t bytes;      // of the control message; 0 for a put
  uint32_t immediate;  // of the put
  uint32_t reserved;
};
static_assert(sizeof(RecordHeader) == 16);

// The producer changes Free -> Claiming -> Open, and Open -> Closed when it ends. The consumer empties a closed ring
// and sets it to Free.
enum class RingState : uint32_t { Free, Claiming, Open, Closed };

// Single producer, single consumer. Positions count bytes and never go back. Each side checks the other's position.
// Records are multiples of 16 bytes and may wrap around the end.
struct Ring {
  static constexpr uint64_t kBytes = 65536;
  static constexpr uint64_t kGranule = sizeof(RecordHeader);

  alignas(64) std::atomic<uint64_t> head{0};     // the producer's position
  alignas(64) std::atomic<uint64_t> tail{0};     // the consumer's position
  alignas(64) std::atomic<uint32_t> refused{0};  // the producer found no room and wants to be woken
  alignas(64) std::array<std::byte, kBytes> data;

  static constexpr uint64_t recordBytes(uint64_t payload) {
    return sizeof(RecordHeader) + (payload + kGranule - 1) / kGranule * kGranule;
  }

  // Called by the producer. False if there is no room; nullopt if the consumer's position is impossible.
  std::optional<bool> hasRoom(uint64_t payload) const {
    const uint64_t used =
        head.load(std::memory_order_relaxed) - tail.load(std::memory_order_acquire);
    if (used > kBytes) return std::nullopt;
    return kBytes - used >= recordBytes(payload);
  }

  // Called by the producer after hasRoom(). A consumer that sees the record also sees all earlier stores.
  void push(const RecordHeader& header, Bytes payload) {
    const uint64_t at = head.load(std::memory_order_relaxed);
    copyIn(at, std::as_bytes(std::span(&header, 1)));
    copyIn(at + sizeof header, payload);
    head.store(at + recordBytes(payload.size()), std::memory_order_release);
  }

  void copyIn(uint64_t at, Bytes from) {
    if (from.empty()) return;
    const uint64_t first = std::min<uint64_t>(from.size(), kBytes - at % kBytes);
    std::memcpy(data.data() + at % kBytes, from.data(), first);
    std::memcpy(data.data(), from.data() + first, from.size() - first);
  }
  void copyOut(uint64_t at, std::span<std::byte> to) const {
    if (to.empty()) return;
    const uint64_t first = std::min<uint64_t>(to.size(), kBytes - at % kBytes);
    std::memcpy(to.data(), data.data() + at % kBytes, first);
    std::memcpy(to.data() + first, data.data(), to.size() - first);
  }
};

// The process that sends on a ring.
struct RingClaim {
  std::atomic<RingState> state{RingState::Free};
  uint32_t senderGeneration;  // this field and the next two are written before Open
  uint32_t receiverGeneration;
  Nonce sender;
};

// All rings to one receiver. Zeroed memory is a valid table, so unused rings need no pages. The claims lie side by
// side: whoever looks for a ring does not touch a page of each, which would get memory by that.
struct RingTable {
  static constexpr uint32_t kRings = 256;
  alignas(64) std::atomic<uint32_t> claims{
      0};  // counts rings that became Open; the receiver then looks for new senders
  std::array<RingClaim, kRings> claimOf;  // by ring
  std::array<Ring, kRings> rings;

  RingClaim& claim(const Ring& ring) { return claimOf[static_cast<size_t>(&ring - rings.data())]; }
};

}  // namespace smddp::transport::shm
