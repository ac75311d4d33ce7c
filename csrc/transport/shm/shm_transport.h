// Transport between the processes of a node: puts are copies into the peer's slab, everything else
// is a record in a ring there.
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

// At most one at a time per slab. The rings of the slab stay where they are when this ends, so that
// a peer that notices late writes into a closed ring and not into somebody's memory.
//
// A sleeping peer is woken through its Doorbell; our own is for the engine to sleep on (no
// waitDescriptor()). A put is complete when the call returns, and reported by the next poll().
// Errors: a peer that died, left, or wrote nonsense is reported once; nothing is sent to it any
// more.
class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(std::shared_ptr<Slab> slab);
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
  // What address() says.
  struct Address {
    SegmentAddress slab;
    uint32_t generation = 0;
    uint32_t reserved = 0;
  };

  struct Peer {
    PeerId id = 0;
    Address address;
    std::shared_ptr<Mate> mate;  // none: attaching failed
    Ring* outgoing = nullptr;    // in the mate's slab
    Ring* incoming = nullptr;    // in ours; none until the peer claimed it
    StoreChoice stores;
    std::string trouble;  // found while sending; reported by the next poll()
    bool failed = false;  // reported
  };

  void attach(Peer& peer);
  Ring* claimRing(RingTable& table, uint32_t receiverGeneration) const;
  bool roomFor(Peer& peer, uint64_t payload);
  void findIncoming();
  size_t pollPeer(Peer& peer, Sink& sink);
  size_t drain(Peer& peer, Sink& sink);
  bool deliver(Peer& peer, uint64_t at, uint64_t available, Sink& sink, uint64_t& consumed);
  std::string goneBecause(Peer& peer) const;
  static void close(Peer& peer);
  static void release(Ring& ring);

  const std::shared_ptr<Slab> slab_;
  RingTable* rings_ = nullptr;
  uint32_t generation_ = 0;
  uint32_t claimsSeen_ = 0;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<uint64_t> done_;       // tokens to report
  std::vector<uint64_t> reporting_;  // the same during poll(): a sink may put() more
};

}  // namespace smddp::transport::shm
