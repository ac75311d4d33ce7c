// One end of a SimNetwork. It queues what has arrived until the next poll().
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "transport/sim/network.h"
#include "transport/transport.h"

namespace smddp::transport::sim {

// Made by SimNetwork::create(); the network must outlive it. It does not own registered memory. When it is destroyed,
// all its messages in flight vanish.
class SimTransport final : public Transport {
 public:
  ~SimTransport() override;

  int endpoint() const { return endpoint_; }
  const std::string& name() const { return name_; }

  std::vector<std::byte> address() const override;
  PeerId connect(Bytes address, const std::string& description) override;
  RemoteKey registerMemory(std::span<std::byte> memory) override;
  bool addSource(std::span<std::byte>) override { return true; }
  [[nodiscard]] bool control(PeerId peer, Bytes message) override;
  [[nodiscard]] bool put(PeerId peer, const RemoteSlot& slot, uint32_t immediate, Bytes header,
                         Payload payload, uint64_t token) override;
  size_t poll(Sink& sink) override;
  std::string describe() const override;

 private:
  friend class SimNetwork;
  struct Arrival {
    enum class Kind { Control, Put, PutDone, PeerFailed } kind;
    PeerId peer = 0;
    uint64_t value = 0;            // immediate or token
    std::vector<std::byte> bytes;  // a control message, or a payload that may go elsewhere
  };
  struct Region {
    uint64_t key = 0;
    std::span<std::byte> memory;
  };

  SimTransport(SimNetwork& network, int endpoint, std::string name)
      : network_(network), endpoint_(endpoint), name_(std::move(name)) {}
  // The memory that a put of this length writes. Throws Transport if the key or the bounds are wrong.
  std::span<std::byte> locate(const RemoteSlot& slot, size_t length) const;
  void onControl(int from, std::vector<std::byte> message);
  void onPut(int from, uint32_t immediate, Bytes payload);
  void onPutDone(uint64_t token) { arrivals_.push_back({Arrival::Kind::PutDone, 0, token, {}}); }
  void onPeerFailed(int endpoint, const std::string& cause);
  int endpointOf(PeerId peer) const;

  SimNetwork& network_;
  const int endpoint_;
  const std::string name_;
  bool killed_ = false;
  std::vector<int> peers_;        // endpoint by PeerId
  std::map<int, PeerId> peerOf_;  // PeerId by endpoint
  std::vector<Region> regions_;   // RemoteKey::address is the index
  std::deque<Arrival> arrivals_;
  std::map<int, std::deque<std::vector<std::byte>>>
      strangers_;  // messages of endpoints that we are not connected to
};

}  // namespace smddp::transport::sim
