// One transport over several network cards of a rank. Each card is a transport of its own; puts go to them in turn.
//
// Peer numbers and memory keys are those of the first card. Control messages use the first card only, because they
// must stay in order. The keys of a region on the other cards are announced to the peers by control messages on the
// second card, which carries no others. Until a peer has them, it puts over the first card; so no peer waits for an
// announcement. Peers may have different numbers of cards; two peers use as many as both have.
//
// Threads, errors and ownership are those of Transport. If one card loses a peer, the peer has failed. This is
// reported only after the other cards have delivered what had arrived.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/file_descriptor.h"
#include "transport/transport.h"

namespace smddp::transport {

class StripedTransport final : public Transport {
 public:
  // Takes at least one card, and at most as many as fit into an announcement.
  explicit StripedTransport(std::vector<std::unique_ptr<Transport>> cards);
  ~StripedTransport() override;

  std::vector<std::byte> address() const override;
  PeerId connect(Bytes address, const std::string& description) override;
  RemoteKey registerMemory(std::span<std::byte> memory) override;
  bool addSource(std::span<std::byte> memory) override;
  std::string addDeviceSource(const DeviceMemory& memory) override;
  void removeDeviceSource(std::span<std::byte> memory) override;
  [[nodiscard]] bool control(PeerId peer, Bytes message) override;
  [[nodiscard]] bool put(PeerId peer, const RemoteSlot& slot, uint32_t immediate, Bytes header,
                         Payload payload, uint64_t token) override;
  void withdraw(std::span<std::byte> memory) override;
  bool isDelivered(PeerId peer) const override;
  size_t poll(Sink& sink) override;
  int waitDescriptor() const override { return wait_.get(); }
  bool prepareWait() override;
  std::string describe() const override;

 private:
  // The keys of one region, by card.
  using Keys = std::vector<RemoteKey>;
  struct Peer {
    std::vector<PeerId> at;  // its number on each card that we both have
    size_t announced = 0;    // the number of our regions that were announced to it
    std::map<std::pair<uint64_t, uint64_t>, Keys>
        regions;  // its regions, by the key of the first card
    size_t nextCard = 0;
    bool failed = false;
  };
  struct Failure {
    PeerId peer;
    std::string cause;
    int polls = 0;  // polls since it was noticed
  };
  class CardSink;

  Peer& peerOf(PeerId peer);
  void announce();
  void onAnnouncement(PeerId peer, Bytes message);
  void fail(PeerId peer, const std::string& cause);
  size_t reportFailures(Sink& sink, bool quiet);

  std::vector<std::unique_ptr<Transport>> cards_;
  std::vector<std::map<PeerId, PeerId>> peerAt_;  // by card: the card's peer number -> ours
  std::map<PeerId, Peer> peers_;
  std::vector<Keys> regions_;
  std::vector<Failure> failures_;  // not yet reported
  FileDescriptor wait_;            // an epoll of the cards' descriptors
};

}  // namespace smddp::transport
