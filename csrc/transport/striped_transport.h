// One transport over the several network cards of a rank: each card is a transport of its own, and puts are dealt
// to them in turn.
//
// The first card stands for all: peers have its numbers, memory has its keys, control messages travel on it,
// because only one card keeps their order. The keys of a region on the other cards are announced by control
// messages of the second card, which carries no others. Until a peer has them it puts by the first card, so nobody
// waits for an announcement. Peers may have different numbers of cards; two of them use as many as both have.
//
// Threads, errors and ownership are those of Transport. When one card loses a peer the peer is lost, but this is
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
  // At least one card, and no more than an announcement has room for.
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
  size_t poll(Sink& sink) override;
  int waitDescriptor() const override { return wait_.get(); }
  bool prepareWait() override;
  std::string describe() const override;

 private:
  // The keys of one region, by card.
  using Keys = std::vector<RemoteKey>;
  struct Peer {
    std::vector<PeerId> at;  // its number on each card that we both have
    size_t announced = 0;    // regions of ours that it has been told of
    std::map<std::pair<uint64_t, uint64_t>, Keys> regions;  // its own, by the key of the first card
    size_t nextCard = 0;
    bool failed = false;
  };
  struct Failure {
    PeerId peer;
    std::string cause;
    int polls = 0;  // since it was noticed
  };
  class Tap;

  Peer& peerOf(PeerId peer);
  void announce();
  void onAnnouncement(PeerId peer, Bytes message);
  void fail(PeerId peer, const std::string& cause);
  size_t reportFailures(Sink& sink, bool quiet);

  std::vector<std::unique_ptr<Transport>> cards_;
  std::vector<std::map<PeerId, PeerId>> peerAt_;  // by card: its number there to ours
  std::map<PeerId, Peer> peers_;
  std::vector<Keys> regions_;
  std::vector<Failure> failures_;  // not yet reported
  FileDescriptor wait_;            // an epoll of the cards' descriptors
};

}  // namespace smddp::transport
