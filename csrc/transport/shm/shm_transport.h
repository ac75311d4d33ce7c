// The transport between the processes of a node. A put is a copy into the peer's slab; everything else is a record in a
// ring there.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/shm/ring.h"
#include "transport/shm/slab.h"
#include "transport/shm/store_choice.h"
#include "transport/transport.h"

namespace smddp::transport::shm {

// At most one at a time per slab. The rings of the slab stay allocated when this object ends. So a peer that notices
// the end late writes into a closed ring, and not into memory that is used again.
//
// It wakes a sleeping peer through the peer's Doorbell. The engine sleeps on our own one; there is no
// waitDescriptor(). A put is complete when the call returns; the next poll() reports it.
// Threads: the one that owns the engine. Errors: a peer that died, left, or wrote an impossible record is reported
// once; nothing is sent to it any more.
class ShmTransport final : public Transport {
 public:
  // `stores`: how puts write into the slabs of peers.
  explicit ShmTransport(std::shared_ptr<Slab> slab, StagingStores stores = StagingStores::Auto);
  ~ShmTransport() override;
  ShmTransport(const ShmTransport&) = delete;
  ShmTransport& operator=(const ShmTransport&) = delete;

  std::vector<std::byte> address() const override;
  PeerId connect(Bytes address, const std::string& description) override;
  // `memory` must lie in the slab.
  RemoteKey registerMemory(std::span<std::byte> memory) override;
  [[nodiscard]] bool control(PeerId peer, Bytes message) override;
  [[nodiscard]] bool put(PeerId peer, const RemoteSlot& slot, uint32_t immediate, Bytes header,
                         Payload payload, uint64_t token) override;
  size_t poll(Sink& sink) override;
  std::string describe() const override;

 private:
  // The contents of address().
  struct Address {
    SegmentAddress slab;
    uint32_t generation = 0;
    uint32_t reserved = 0;
  };

  struct Peer {
    PeerId id = 0;
    Address address;
    std::shared_ptr<Mate> mate;  // null: attaching failed
    RingTable* rings = nullptr;  // in the mate's slab
    Ring* outgoing = nullptr;    // one of them
    Ring* incoming = nullptr;    // in our slab; null until the peer has claimed one
    StoreChoice stores;
    std::string trouble;  // a failure found while sending; the next poll() reports it
    bool failed = false;  // the failure was reported
  };

  void attach(Peer& peer);
  Ring* claimRing(RingTable& table, uint32_t receiverGeneration) const;
  bool roomFor(Peer& peer, uint64_t payload);
  void findIncoming();
  size_t pollPeer(Peer& peer, Sink& sink);
  size_t drain(Peer& peer, Sink& sink);
  bool deliver(Peer& peer, uint64_t at, uint64_t available, Sink& sink, uint64_t& consumed);
  std::string goneBecause(Peer& peer) const;
  bool isOver(const Peer& peer, const Ring& ring) const;
  static void close(Peer& peer);
  void release(Ring& ring);

  const std::shared_ptr<Slab> slab_;
  const StagingStores stagingStores_;
  RingTable* rings_ = nullptr;
  uint32_t generation_ = 0;
  uint32_t claimsSeen_ = 0;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<uint64_t> done_;       // tokens of puts that the next poll() reports
  std::vector<uint64_t> reporting_;  // those that this poll() reports; a sink's put() adds to done_
};

}  // namespace smddp::transport::shm
