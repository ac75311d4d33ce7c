#include "transport/fabric/fabric.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <deque>
#include <random>
#include <unordered_map>
#include <utility>

#include "common/config.h"
#include "common/error.h"
#include "common/log.h"
#include "transport/fabric/discovery.h"
#include "transport/fabric/endpoint.h"
#include "transport/fabric/inbox.h"
#include "transport/fabric/reassembly.h"
#include "transport/fabric/wire.h"

namespace smddp::transport::fabric {
namespace {

constexpr const char* kTag = "transport/fabric";
// Messages and puts of one peer that were accepted but that the provider has not taken yet.
constexpr size_t kMaxQueued = 64;

struct Peer {
  fi_addr_t address = FI_ADDR_UNSPEC;
  uint64_t id = 0;
  std::string description;
  bool failed = false;
  bool queued = false;  // in FabricTransport::queued_
  uint64_t nextSequence = 0;
  // Two lines, because a grant must not stand behind megabytes of data.
  std::deque<std::vector<std::byte>> controls;
  std::deque<std::shared_ptr<OutgoingPut>> puts;
};

uint64_t randomId() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

// See transport.h for the contract. One endpoint; peers are kept until the end.
class FabricTransport final : public Transport, private Completions {
 public:
  FabricTransport(const Discovery& found, const Choice& choice, const Options& options)
      : endpoint_(*found.raw[choice.index], found.offered[choice.index], options),
        reassembly_(endpoint_.registry()),
        why_(choice.why),
        id_(randomId()) {}

  std::vector<std::byte> address() const override {
    return encode({id_, endpoint_.protocol(), endpoint_.provider().provider, endpoint_.name()});
  }
  PeerId connect(Bytes address, const std::string& description) override;
  RemoteKey registerMemory(std::span<std::byte> memory) override { return endpoint_.registry().add(memory); }
  bool control(PeerId peer, Bytes message) override;
  bool put(PeerId peer, const RemoteSlot& slot, uint32_t immediate, Bytes header, Bytes payload,
           uint64_t token) override;
  size_t poll(Sink& sink) override;
  int waitDescriptor() const override { return endpoint_.waitDescriptor(); }
  bool prepareWait() override;
  std::string describe() const override;

 private:
  void onSent(Operation& operation) override;
  void onReceived(Bytes message) override;
  void onRemoteWrite(uint32_t immediate) override { sink_->onPut(immediate); }
  void onSendFailed(Operation& operation, const std::string& cause) override;

  Peer& peerOf(PeerId peer);
  bool prepare(OutgoingPut& put, Bytes header, Bytes payload);
  ssize_t postControl(Peer& peer, PeerId id, Bytes message);
  ssize_t postPut(Peer& peer, const std::shared_ptr<OutgoingPut>& put);
  ssize_t postWrite(Peer& peer, Operation& operation);
  ssize_t postFragment(Peer& peer, Operation& operation);
  void pump(Peer& peer, PeerId id);
  void pumpAll();
  void receiveFragment(const FragmentHeader& fragment, Bytes bytes);
  bool accepted(Peer& peer, PeerId id, ssize_t result, const char* what);
  void fail(PeerId peer, const std::string& cause);
  size_t reportFailures();

  Endpoint endpoint_;
  Inbox inbox_;
  Reassembly reassembly_;
  std::string why_;
  uint64_t id_;
  uint64_t nextPut_ = 0;
  std::vector<Peer> peers_;
  std::unordered_map<uint64_t, PeerId> peerById_;
  std::vector<PeerId> queued_;  // peers with something in a line
  std::vector<std::pair<PeerId, std::string>> failures_;  // not yet reported
  Sink* sink_ = nullptr;  // during poll()
};

PeerId FabricTransport::connect(Bytes bytes, const std::string& description) {
  const Address address = decodeAddress(bytes);
  const ProviderInfo& own = endpoint_.provider();
  if (address.provider != own.provider || address.protocol != endpoint_.protocol())
    raise(ErrorKind::Usage,
          "{} uses provider {} with {}, this rank uses {} with {}; set SMDDP_PROVIDER and SMDDP_FABRIC_RMA to "
          "what all hosts have",
          description, address.provider, toString(address.protocol), own.provider, toString(endpoint_.protocol()));
  // Groups share peers: a second introduction changes nothing.
  if (const auto known = peerById_.find(address.id); known != peerById_.end()) return known->second;
  Peer peer;
  peer.address = endpoint_.insert(address.name);
  peer.id = address.id;
  peer.description = description;
  const auto id = static_cast<PeerId>(peers_.size());
  peers_.push_back(std::move(peer));
  peerById_.emplace(address.id, id);
  inbox_.introduce(address.id, id);
  SMDDP_LOG(Debug, kTag, "peer {} is {}", id, description);
  return id;
}

Peer& FabricTransport::peerOf(PeerId peer) {
  SMDDP_CHECK(peer >= 0 && static_cast<size_t>(peer) < peers_.size(), "peer {} was never introduced", peer);
  return peers_[static_cast<size_t>(peer)];
}

bool FabricTransport::control(PeerId id, Bytes message) {
  SMDDP_CHECK(message.size() <= kMaxControlBytes, "control message of {} bytes", message.size());
  Peer& peer = peerOf(id);
  if (peer.failed || peer.controls.size() >= kMaxQueued) return false;
  const ControlHeader header{MessageKind::Control, 0, id_, peer.nextSequence};
  std::vector<std::byte> bytes(sizeof(header) + message.size());
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::copy(message.begin(), message.end(), bytes.begin() + sizeof(header));
  ++peer.nextSequence;
  peer.controls.push_back(std::move(bytes));
  pump(peer, id);
  return true;
}

bool FabricTransport::put(PeerId id, const RemoteSlot& slot, uint32_t immediate, Bytes header, Bytes payload,
                          uint64_t token) {
  SMDDP_CHECK(header.size() == kHeaderBytes, "header of {} bytes", header.size());
  if (endpoint_.protocol() == Protocol::Write &&
      payload.size() > endpoint_.provider().maxMessageBytes - kHeaderBytes)
    raise(ErrorKind::Usage, "provider {} writes at most {} bytes at a time; set SMDDP_FABRIC_CHUNK_BYTES below that",
          endpoint_.provider().provider, endpoint_.provider().maxMessageBytes);
  Peer& peer = peerOf(id);
  if (peer.failed || peer.puts.size() >= kMaxQueued) return false;
  auto put = std::make_shared<OutgoingPut>();
  put->peer = id;
  put->slot = slot;
  put->immediate = immediate;
  put->token = token;
  if (!prepare(*put, header, payload)) return false;
  put->number = nextPut_++;
  peer.puts.push_back(std::move(put));
  pump(peer, id);
  return true;
}

// Finds where the provider can take the bytes from: in place, or a copy. False: no room for a copy.
bool FabricTransport::prepare(OutgoingPut& put, Bytes header, Bytes payload) {
  std::copy(header.begin(), header.end(), put.header.begin());
  put.payload = payload;
  bool known = true;
  if (!payload.empty()) put.descriptor = endpoint_.registry().descriptorOf(payload, known);
  // A provider that writes from one piece of memory only gets header and payload side by side.
  put.headerInBounce = endpoint_.protocol() == Protocol::Write && endpoint_.provider().iovLimit < 2;
  if (known && !put.headerInBounce) return true;
  put.bounce = endpoint_.bounces().take(put.totalBytes());
  if (!put.bounce) return false;
  std::byte* const copy = put.bounce.get();
  std::memcpy(copy, header.data(), header.size());
  if (!payload.empty()) std::memcpy(copy + header.size(), payload.data(), payload.size());
  put.payload = {copy + header.size(), payload.size()};
  put.descriptor = endpoint_.registry().descriptorOf({copy, put.totalBytes()}, known);
  return true;
}

ssize_t FabricTransport::postControl(Peer& peer, PeerId id, Bytes message) {
  Operation* const operation = endpoint_.acquire(Operation::Kind::Control);
  if (operation == nullptr) return -FI_EAGAIN;
  operation->peer = id;
  std::memcpy(operation->slot, message.data(), message.size());
  const ssize_t result = endpoint_.send(peer.address, *operation, message.size(), {}, nullptr);
  if (result != 0) endpoint_.release(*operation);
  return result;
}

// Hands the next part of the put to the provider: all of it as a write, or one fragment.
ssize_t FabricTransport::postPut(Peer& peer, const std::shared_ptr<OutgoingPut>& put) {
  Operation* const operation = endpoint_.acquire(Operation::Kind::Put);
  if (operation == nullptr) return -FI_EAGAIN;
  operation->peer = put->peer;
  operation->put = put;
  const ssize_t result =
      endpoint_.protocol() == Protocol::Write ? postWrite(peer, *operation) : postFragment(peer, *operation);
  if (result != 0)
    endpoint_.release(*operation);
  else
    ++put->inFlight;
  return result;
}

ssize_t FabricTransport::postWrite(Peer& peer, Operation& operation) {
  OutgoingPut& put = *operation.put;
  const size_t headBytes = put.headerInBounce ? 0 : kHeaderBytes;
  const Bytes tail = put.headerInBounce ? Bytes(put.bounce.get(), put.totalBytes()) : put.payload;
  std::memcpy(operation.slot, put.header.data(), headBytes);
  const ssize_t result =
      endpoint_.write(peer.address, operation, headBytes, tail, put.descriptor,
                      put.slot.region.address + put.slot.offset, put.slot.region.key, put.immediate);
  if (result == 0) put.posted = put.totalBytes();
  return result;
}

ssize_t FabricTransport::postFragment(Peer& peer, Operation& operation) {
  OutgoingPut& put = *operation.put;
  const FragmentHeader fragment{MessageKind::Fragment, put.immediate,    id_,       put.number,
                                put.slot,              put.totalBytes(), put.posted};
  size_t headBytes = sizeof(fragment);
  std::memcpy(operation.slot, &fragment, sizeof(fragment));
  size_t piece = std::min<size_t>(endpoint_.messageBytes() - sizeof(fragment), put.totalBytes() - put.posted);
  const size_t size = piece;
  size_t begin = 0;  // in the payload
  if (put.posted == 0) {
    // The put's own header begins the first fragment.
    std::memcpy(operation.slot + headBytes, put.header.data(), kHeaderBytes);
    headBytes += kHeaderBytes;
    piece -= kHeaderBytes;
  } else {
    begin = put.posted - kHeaderBytes;
  }
  const ssize_t result =
      endpoint_.send(peer.address, operation, headBytes, put.payload.subspan(begin, piece), put.descriptor);
  if (result == 0) put.posted += size;
  return result;
}

// What a post returned: true when it was taken. An error condemns the peer.
bool FabricTransport::accepted(Peer& peer, PeerId id, ssize_t result, const char* what) {
  if (result == 0) return true;
  if (result != -FI_EAGAIN)
    fail(id, fmt::format("{} to {} failed: {}", what, peer.description, fi_strerror(static_cast<int>(-result))));
  return false;
}

// Hands over what waits, in order, until the provider has no more room.
void FabricTransport::pump(Peer& peer, PeerId id) {
  while (!peer.controls.empty() &&
         accepted(peer, id, postControl(peer, id, peer.controls.front()), "a control message"))
    peer.controls.pop_front();
  while (!peer.puts.empty() && accepted(peer, id, postPut(peer, peer.puts.front()), "a put")) {
    if (peer.puts.front()->posted == peer.puts.front()->totalBytes()) peer.puts.pop_front();
  }
  if (!peer.queued && !(peer.controls.empty() && peer.puts.empty())) {
    peer.queued = true;
    queued_.push_back(id);
  }
}

void FabricTransport::pumpAll() {
  // Another peer goes first each time, so that none is starved of operations.
  if (queued_.size() > 1) std::rotate(queued_.begin(), queued_.begin() + 1, queued_.end());
  for (const PeerId id : std::exchange(queued_, {})) {
    Peer& peer = peerOf(id);
    peer.queued = false;
    pump(peer, id);
  }
}

size_t FabricTransport::poll(Sink& sink) {
  sink_ = &sink;
  inbox_.deliverIntroduced(sink);
  size_t events = endpoint_.poll(*this);
  for (const PeerId peer : inbox_.takeOverflowed())
    fail(peer, "it sent more control messages than anybody may have under way");
  if (!queued_.empty()) pumpAll();
  events += reportFailures();
  sink_ = nullptr;
  return events;
}

bool FabricTransport::prepareWait() {
  // What waits for room has no event of its own.
  if (!queued_.empty() || !failures_.empty() || inbox_.hasIntroduced()) return false;
  return endpoint_.prepareWait();
}

void FabricTransport::onSent(Operation& operation) {
  if (operation.kind != Operation::Kind::Put) return;
  OutgoingPut& put = *operation.put;
  if (--put.inFlight == 0 && put.posted == put.totalBytes() && !peerOf(put.peer).failed)
    sink_->onPutDone(put.token);
}

void FabricTransport::onSendFailed(Operation& operation, const std::string& cause) {
  if (operation.kind == Operation::Kind::Put) --operation.put->inFlight;
  const char* const what = operation.kind == Operation::Kind::Put ? "a put" : "a control message";
  fail(operation.peer, fmt::format("{} to {} failed: {}", what, peerOf(operation.peer).description, cause));
}

void FabricTransport::onReceived(Bytes message) {
  const auto kind = readStruct<MessageKind>(message);
  if (kind == MessageKind::Control) {
    if (const auto header = readStruct<ControlHeader>(message)) {
      const auto known = peerById_.find(header->sender);
      if (known != peerById_.end() && peerOf(known->second).failed) return;
      return inbox_.arrived(header->sender, header->sequence, message.subspan(sizeof(*header)), *sink_);
    }
  }
  if (kind == MessageKind::Fragment && endpoint_.protocol() == Protocol::Send) {
    if (const auto fragment = readStruct<FragmentHeader>(message))
      return receiveFragment(*fragment, message.subspan(sizeof(*fragment)));
  }
  SMDDP_LOG(Debug, kTag, "dropped {} bytes that are no message of ours", message.size());
}

void FabricTransport::receiveFragment(const FragmentHeader& fragment, Bytes bytes) {
  const auto known = peerById_.find(fragment.sender);
  try {
    if (reassembly_.accept(fragment, bytes)) sink_->onPut(fragment.immediate);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::Transport) throw;
    if (known != peerById_.end()) return fail(known->second, error.what());
    SMDDP_LOG(Debug, kTag, "unknown sender {:016x}: {}", fragment.sender, error.what());
  }
}

void FabricTransport::fail(PeerId id, const std::string& cause) {
  Peer& peer = peerOf(id);
  if (std::exchange(peer.failed, true)) return;
  peer.controls.clear();
  peer.puts.clear();
  failures_.emplace_back(id, cause);
}

size_t FabricTransport::reportFailures() {
  const auto failures = std::exchange(failures_, {});
  for (const auto& [peer, cause] : failures) sink_->onPeerFailed(peer, cause);
  return failures.size();
}

std::string FabricTransport::describe() const {
  const uint32_t version = fi_version();
  return fmt::format("libfabric {}.{}, {}, {}", FI_MAJOR(version), FI_MINOR(version),
                     fabric::describe(endpoint_.provider(), endpoint_.protocol(), why_),
                     endpoint_.waitDescriptor() >= 0 ? "waits on a descriptor" : "waits by looking");
}

Options optionsFromSettings() {
  Options options;
  options.provider = settings().provider;
  options.interface = settings().interface;
  options.masterAddress = environment("MASTER_ADDR");
  options.rma = settings().fabricRma;
  const std::string rank = environment("LOCAL_RANK");
  // Without a launcher there is one rank, or nobody to share the cards with.
  int parsed = 0;
  const auto [end, error] = std::from_chars(rank.data(), rank.data() + rank.size(), parsed);
  if (error == std::errc() && end == rank.data() + rank.size() && parsed >= 0) options.localRank = parsed;
  return options;
}

Choice chooseFrom(const Discovery& found, const Options& options) {
  return choose(found.offered, options, routeTo(options.masterAddress));
}

}  // namespace

std::unique_ptr<Transport> create() { return create(optionsFromSettings()); }

std::unique_ptr<Transport> create(const Options& options) {
  Discovery found = discover();
  const Choice choice = chooseFrom(found, options);
  ProviderInfo& chosen = found.offered[choice.index];
  chosen.mrMode |= options.extraMrMode;
  chosen.iovLimit = std::min(chosen.iovLimit, options.iovLimit);
  return std::make_unique<FabricTransport>(found, choice, options);
}

bool available(std::string* why) {
  try {
    chooseFrom(discover(), optionsFromSettings());
    return true;
  } catch (const Error& error) {
    if (why != nullptr) *why = error.what();
    return false;
  }
}

}  // namespace smddp::transport::fabric
