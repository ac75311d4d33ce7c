// The transport over one libfabric endpoint. It knows the peers, keeps control messages in order, and makes puts from
// remote writes or from fragments.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "transport/fabric/early_messages.h"
#include "transport/fabric/endpoint.h"
#include "transport/fabric/reassembly.h"
#include "transport/fabric/wire.h"
#include "transport/transport.h"

namespace smddp::transport::fabric {

// Owns one endpoint and its peers; peers are kept until the end. Threads, errors and ownership are those of Transport.
class FabricTransport final : public Transport, private CompletionHandler {
 public:
  // `raw` is libfabric's description of `chosen`.
  FabricTransport(const fi_info& raw, ProviderInfo chosen, std::string why, const Options& options);
  ~FabricTransport() override;

  std::vector<std::byte> address() const override;
  PeerId connect(Bytes address, const std::string& description) override;
  RemoteKey registerMemory(std::span<std::byte> memory) override {
    return endpoint_->registry().add(memory);
  }
  bool addSource(std::span<std::byte> memory) override;
  std::string addDeviceSource(const DeviceMemory& memory) override;
  void removeDeviceSource(std::span<std::byte> memory) override;
  bool control(PeerId peer, Bytes message) override;
  bool put(PeerId peer, const RemoteSlot& slot, uint32_t immediate, Bytes header, Payload payload,
           uint64_t token) override;
  size_t poll(Sink& sink) override;
  bool isDelivered(PeerId peer) const override;
  int waitDescriptor() const override { return endpoint_->waitDescriptor(); }
  bool prepareWait() override;
  std::string describe() const override;

  // The bytes of all payloads, and of those that were first copied to registered memory.
  struct Traffic {
    uint64_t put = 0;
    uint64_t copied = 0;
  };
  const Traffic& traffic() const { return traffic_; }

 private:
  void onSent(PostedOperation& operation) override;
  void onReceived(Bytes message) override;
  void onRemoteWrite(uint32_t immediate) override;
  void onSendFailed(PostedOperation& operation, const std::string& cause) override;

  struct Peer {
    fi_addr_t address = FI_ADDR_UNSPEC;
    uint64_t id = 0;
    uint64_t ourProof = 0;    // in what we send to it
    uint64_t theirProof = 0;  // in what it sends to us
    bool failed = false;
    bool queued = false;  // in FabricTransport::queued_
    uint64_t nextSequence = 0;
    size_t inFlight = 0;  // operations that are posted and have not ended
    // There are two queues, because a grant must not wait behind megabytes of data.
    std::deque<std::vector<std::byte>> controls;
    std::deque<std::shared_ptr<OutgoingPut>> puts;
  };

  Peer& peerOf(PeerId peer);
  uint64_t proofOf(uint64_t sender, uint64_t receiver) const;
  PeerId knownPeer(uint64_t sender) const;  // negative: connect() has not made it known yet
  bool isGenuine(PeerId peer, uint64_t sender, uint64_t proof);
  bool prepare(OutgoingPut& put, Bytes header, Payload payload);
  ssize_t postControl(Peer& peer, PeerId id, Bytes message);
  ssize_t postPut(Peer& peer, const std::shared_ptr<OutgoingPut>& put);
  ssize_t postWrite(Peer& peer, PostedOperation& operation);
  ssize_t postFragment(Peer& peer, PostedOperation& operation);
  void pump(Peer& peer, PeerId id);
  void pumpAll();
  void receiveFragment(PeerId from, const FragmentHeader& fragment, Bytes bytes);
  bool accepted(PeerId id, ssize_t result, const char* what);
  void fail(PeerId peer, const std::string& cause);
  // Throws Resource if this process has no file descriptor for a connection.
  size_t reportFailures();

  std::unique_ptr<Endpoint> endpoint_;
  EarlyMessages earlyMessages_;
  Reassembly reassembly_;
  std::string why_;
  uint64_t id_;
  Seal seal_;
  bool hasWarnedOfStrangers_ = false;
  uint64_t nextPut_ = 0;
  Traffic traffic_;
  bool registersSources_ = true;  // false after a registration has failed for lack of room
  std::vector<Peer> peers_;
  std::unordered_map<uint64_t, PeerId> peerById_;
  std::unordered_set<uint32_t>
      halfArrived_;             // immediates of puts of which one of two writes has arrived
  std::vector<PeerId> queued_;  // peers that have something in a queue
  std::vector<std::pair<PeerId, std::string>> failures_;  // not yet reported
  std::string shortage_;  // a failure for which this process is to blame, not yet reported
  Sink* sink_ = nullptr;  // during poll()
};

}  // namespace smddp::transport::fabric
