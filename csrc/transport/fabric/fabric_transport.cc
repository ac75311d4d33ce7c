#include "transport/fabric/fabric_transport.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <span>

#include "common/error.h"
#include "common/file_descriptor.h"
#include "common/log.h"
#include "common/random.h"
#include "transport/congestion.h"

namespace smddp::transport::fabric {
namespace {

// The limit, per peer, of messages and of puts that were accepted but not yet posted.
constexpr size_t kMaxQueued = 64;
// Some providers write one piece of memory only. There header and payload are copied into one buffer. From this many
// bytes on two writes are faster than the copy; both have the immediate value with the bit kTwoWrites.
constexpr size_t kTwoWritesBytes = 8192;
constexpr uint32_t kTwoWrites = kMaxImmediate + 1;
// The limit of puts of which one of two writes has arrived. No rank has so many slots.
constexpr size_t kMaxHalves = 1 << 20;

// Keeps an endpoint until the process ends, if its close would block until a peer has taken everything.
void keepOpen(std::unique_ptr<Endpoint> endpoint) {
  SMDDP_LOG(Debug, kTag, "an endpoint stays open: a peer does not take what was sent");
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::unique_ptr<Endpoint>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(endpoint));
}

// libfabric's TCP opens its connections itself, and its errors do not tell that it had no file descriptor for one.
bool lacksDescriptors() {
  const FileDescriptor probe(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  return !probe && (errno == EMFILE || errno == ENFILE);
}

}  // namespace

FabricTransport::FabricTransport(const fi_info& raw, ProviderInfo chosen, std::string why,
                                 const Options& options)
    : endpoint_(std::make_unique<Endpoint>(raw, std::move(chosen), options)),
      reassembly_(endpoint_->registry()),
      why_(std::move(why)),
      id_(randomNumber()),
      seal_(options.seal) {}

FabricTransport::~FabricTransport() {
  if (traffic_.copied > 0) {
    SMDDP_LOG(Debug, kTag, "{} of {} bytes put were copied to registered memory first",
              traffic_.copied, traffic_.put);
  }
  if (!endpoint_->settle()) keepOpen(std::move(endpoint_));
}

bool FabricTransport::addSource(std::span<std::byte> memory) {
  if (!registersSources_) return false;
  try {
    return endpoint_->registry().addLocal(memory);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::Resource) throw;
    registersSources_ = false;
    SMDDP_LOG(Warn, kTag, "from now on sends are copied to registered memory first: {}",
              error.what());
    return false;
  }
}

std::string FabricTransport::addDeviceSource(const DeviceMemory& memory) {
  const ProviderInfo& provider = endpoint_->provider();
  if (!provider.reachesDevices()) {
    return fmt::format("libfabric's provider {} does not reach memory of devices (FI_HMEM)",
                       provider.provider);
  }
  if (endpoint_->protocol() != Protocol::Write) {
    return fmt::format("there are no remote writes with libfabric's provider {}",
                       provider.provider);
  }
  endpoint_->registry().addDevice(memory);
  return "";
}

void FabricTransport::removeDeviceSource(std::span<std::byte> memory) {
  endpoint_->registry().removeDevice(memory);
}

std::vector<std::byte> FabricTransport::address() const {
  return encode({id_, endpoint_->protocol(), endpoint_->provider().provider, endpoint_->name()});
}

PeerId FabricTransport::connect(Bytes bytes, const std::string& description) {
  const Address address = decodeAddress(bytes);
  const ProviderInfo& own = endpoint_->provider();
  if (address.provider != own.provider || address.protocol != endpoint_->protocol())
    raise(ErrorKind::Usage,
          "{} uses provider {} with {}, this rank uses {} with {}; set SMDDP_PROVIDER and "
          "SMDDP_FABRIC_RMA to "
          "what all hosts have",
          description, address.provider, toString(address.protocol), own.provider,
          toString(endpoint_->protocol()));
  // Groups share peers, so the peer may be known.
  if (const auto known = peerById_.find(address.id); known != peerById_.end()) return known->second;
  Peer peer;
  peer.address = endpoint_->insert(address.name);
  peer.id = address.id;
  peer.ourProof = proofOf(id_, address.id);
  peer.theirProof = proofOf(address.id, id_);
  const auto id = static_cast<PeerId>(peers_.size());
  peers_.push_back(std::move(peer));
  peerById_.emplace(address.id, id);
  earlyMessages_.introduce(address.id, id);
  SMDDP_LOG(Debug, kTag, "peer {} is {}", id, description);
  return id;
}

FabricTransport::Peer& FabricTransport::peerOf(PeerId peer) {
  SMDDP_CHECK(peer >= 0 && static_cast<size_t>(peer) < peers_.size(),
              "peer {} was never introduced", peer);
  return peers_[static_cast<size_t>(peer)];
}

uint64_t FabricTransport::proofOf(uint64_t sender, uint64_t receiver) const {
  return seal_.proof("fabric", sender, receiver);
}

PeerId FabricTransport::knownPeer(uint64_t sender) const {
  const auto known = peerById_.find(sender);
  return known != peerById_.end() ? known->second : -1;
}

// Also of senders that we do not know yet: they may have learned of us first.
bool FabricTransport::isGenuine(PeerId peer, uint64_t sender, uint64_t proof) {
  if (proof == (peer >= 0 ? peerOf(peer).theirProof : proofOf(sender, id_))) return true;
  if (!std::exchange(hasWarnedOfStrangers_, true)) {
    SMDDP_LOG(Warn, kTag,
              "dropped a message whose sender does not have the job's token (SMDDP_JOB_TOKEN); "
              "another program sends to this rank's port");
  }
  return false;
}

bool FabricTransport::control(PeerId id, Bytes message) {
  SMDDP_CHECK(message.size() <= kMaxControlBytes, "control message of {} bytes", message.size());
  Peer& peer = peerOf(id);
  if (peer.failed || peer.controls.size() >= kMaxQueued) return false;
  const FabricControlHeader header{MessageKind::Control, 0, id_, peer.ourProof, peer.nextSequence};
  std::vector<std::byte> bytes(sizeof(header) + message.size());
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::copy(message.begin(), message.end(), bytes.begin() + sizeof(header));
  ++peer.nextSequence;
  peer.controls.push_back(std::move(bytes));
  pump(peer, id);
  return true;
}

bool FabricTransport::put(PeerId id, const RemoteSlot& slot, uint32_t immediate, Bytes header,
                          Payload payload, uint64_t token) {
  SMDDP_CHECK(header.size() == kHeaderBytes, "header of {} bytes", header.size());
  SMDDP_CHECK(immediate <= kMaxImmediate, "immediate value {:x}", immediate);
  if (endpoint_->protocol() == Protocol::Write &&
      payload.size() > endpoint_->provider().maxMessageBytes - kHeaderBytes)
    raise(ErrorKind::Usage,
          "provider {} writes at most {} bytes at a time; set SMDDP_FABRIC_CHUNK_BYTES below that",
          endpoint_->provider().provider, endpoint_->provider().maxMessageBytes);
  Peer& peer = peerOf(id);
  if (peer.failed || peer.puts.size() >= kMaxQueued) return false;
  auto put = std::make_shared<OutgoingPut>();
  put->peer = id;
  put->slot = slot;
  put->immediate = immediate;
  put->token = token;
  if (!prepare(*put, header, payload)) return false;
  put->number = nextPut_++;
  traffic_.put += payload.size();
  if (put->bounce) traffic_.copied += payload.size();
  peer.puts.push_back(std::move(put));
  pump(peer, id);
  return true;
}

// Decides if the provider takes the bytes in place or needs a copy, and makes the copy. False: no room for a copy.
bool FabricTransport::prepare(OutgoingPut& put, Bytes header, Payload payload) {
  std::copy(header.begin(), header.end(), put.header.begin());
  put.payload = payload;
  const Registry& registry = endpoint_->registry();
  if (payload.onDevice && !payload.empty()) {
    put.descriptor = registry.deviceDescriptorOf(payload);
    put.twoWrites = true;  // one write must not have pieces of host and device
    return true;
  }
  const std::optional<void*> descriptor =
      payload.empty() ? nullptr : registry.descriptorOf(payload);
  const bool known = descriptor.has_value();
  put.descriptor = descriptor.value_or(nullptr);
  const bool onePiece =
      endpoint_->protocol() == Protocol::Write && endpoint_->provider().writesOnePiece();
  put.twoWrites = onePiece && known && payload.size() >= kTwoWritesBytes;
  put.headerInBounce = onePiece && !put.twoWrites;
  if (known && !put.headerInBounce) return true;
  put.bounce = endpoint_->bounces().take(put.totalBytes());
  if (!put.bounce) return false;
  std::byte* const copy = put.bounce.get();
  std::memcpy(copy, header.data(), header.size());
  if (!payload.empty()) std::memcpy(copy + header.size(), payload.data(), payload.size());
  put.payload = {copy + header.size(), payload.size()};
  put.descriptor = registry.descriptorOf({copy, put.totalBytes()}).value();
  return true;
}

ssize_t FabricTransport::postControl(Peer& peer, PeerId id, Bytes message) {
  PostedOperation* const operation = endpoint_->acquire(PostedOperation::Kind::Control);
  if (operation == nullptr) return -FI_EAGAIN;
  operation->peer = id;
  std::memcpy(operation->slot, message.data(), message.size());
  const ssize_t result = endpoint_->send(peer.address, *operation, message.size(), {}, nullptr);
  if (result != 0)
    endpoint_->release(*operation);
  else
    ++peer.inFlight;
  return result;
}

// Posts the next part of the put: all of it in one write, one of two writes, or one fragment.
ssize_t FabricTransport::postPut(Peer& peer, const std::shared_ptr<OutgoingPut>& put) {
  PostedOperation* const operation = endpoint_->acquire(PostedOperation::Kind::Put);
  if (operation == nullptr) return -FI_EAGAIN;
  operation->peer = put->peer;
  operation->put = put;
  const ssize_t result = endpoint_->protocol() == Protocol::Write ? postWrite(peer, *operation)
                                                                  : postFragment(peer, *operation);
  if (result != 0) {
    endpoint_->release(*operation);
  } else {
    ++put->inFlight;
    ++peer.inFlight;
  }
  return result;
}

ssize_t FabricTransport::postWrite(Peer& peer, PostedOperation& operation) {
  OutgoingPut& put = *operation.put;
  const bool second = put.twoWrites && put.posted > 0;
  const size_t headBytes = put.headerInBounce || second ? 0 : kHeaderBytes;
  Bytes tail = put.headerInBounce ? Bytes(put.bounce.get(), put.totalBytes()) : put.payload;
  if (put.twoWrites && !second) tail = {};
  std::memcpy(operation.slot, put.header.data(), headBytes);
  const ssize_t result =
      endpoint_->write(peer.address, operation, headBytes, tail, put.descriptor,
                       put.slot.target.address + put.slot.offset + put.posted, put.slot.target.key,
                       put.twoWrites ? put.immediate | kTwoWrites : put.immediate);
  if (result == 0) put.posted += headBytes + tail.size();
  return result;
}

void FabricTransport::onRemoteWrite(uint32_t immediate) {
  if ((immediate & kTwoWrites) != 0) {
    if (halfArrived_.insert(immediate).second) {
      if (halfArrived_.size() > kMaxHalves) {
        raise(ErrorKind::Transport, "some peer leaves too many messages half written");
      }
      return;
    }
    halfArrived_.erase(immediate);
  }
  sink_->onPut(immediate & kMaxImmediate);
}

ssize_t FabricTransport::postFragment(Peer& peer, PostedOperation& operation) {
  OutgoingPut& put = *operation.put;
  const FragmentHeader fragment{MessageKind::Fragment, put.immediate, id_,
                                peer.ourProof,         put.number,    put.slot,
                                put.totalBytes(),      put.posted};
  size_t headBytes = sizeof(fragment);
  std::memcpy(operation.slot, &fragment, sizeof(fragment));
  size_t piece =
      std::min<size_t>(endpoint_->messageBytes() - sizeof(fragment), put.totalBytes() - put.posted);
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
  const ssize_t result = endpoint_->send(peer.address, operation, headBytes,
                                         put.payload.subspan(begin, piece), put.descriptor);
  if (result == 0) put.posted += size;
  return result;
}

// Takes the result of a post. True if it was accepted. After an error the peer has failed.
bool FabricTransport::accepted(PeerId id, ssize_t result, const char* what) {
  if (result == 0) return true;
  if (result != -FI_EAGAIN)
    fail(id, fmt::format("{} to it failed: {}", what,
                         library().describeError(static_cast<int>(-result))));
  return false;
}

// Posts queued messages and puts, in order, until the provider has no more room.
void FabricTransport::pump(Peer& peer, PeerId id) {
  while (!peer.controls.empty() &&
         accepted(id, postControl(peer, id, peer.controls.front()), "a control message"))
    peer.controls.pop_front();
  while (!peer.puts.empty() && accepted(id, postPut(peer, peer.puts.front()), "a put")) {
    if (peer.puts.front()->posted == peer.puts.front()->totalBytes()) peer.puts.pop_front();
  }
  if (!peer.queued && !(peer.controls.empty() && peer.puts.empty())) {
    peer.queued = true;
    queued_.push_back(id);
  }
}

void FabricTransport::pumpAll() {
  // Begin with another peer each time, so that no peer starves.
  if (queued_.size() > 1) std::rotate(queued_.begin(), queued_.begin() + 1, queued_.end());
  for (const PeerId id : std::exchange(queued_, {})) {
    Peer& peer = peerOf(id);
    peer.queued = false;
    pump(peer, id);
  }
}

bool FabricTransport::isDelivered(PeerId id) const {
  const Peer& peer = peers_[static_cast<size_t>(id)];
  return peer.controls.empty() && peer.puts.empty() && peer.inFlight == 0;
}

size_t FabricTransport::poll(Sink& sink) {
  sink_ = &sink;
  earlyMessages_.deliverIntroduced(sink);
  size_t events = endpoint_->poll(*this);
  for (const PeerId peer : earlyMessages_.takeOverflowed())
    fail(peer, "it sent more control messages than a rank may have in flight");
  if (!queued_.empty()) pumpAll();
  events += reportFailures();
  sink_ = nullptr;
  return events;
}

bool FabricTransport::prepareWait() {
  // No event will tell when there is room for what is queued, so do not sleep.
  if (!queued_.empty() || !failures_.empty() || earlyMessages_.hasIntroduced()) return false;
  return endpoint_->prepareWait();
}

void FabricTransport::onSent(PostedOperation& operation) {
  --peerOf(operation.peer).inFlight;
  if (operation.kind != PostedOperation::Kind::Put) return;
  OutgoingPut& put = *operation.put;
  if (--put.inFlight == 0 && put.posted == put.totalBytes() && !peerOf(put.peer).failed)
    sink_->onPutDone(put.token);
}

void FabricTransport::onSendFailed(PostedOperation& operation, const std::string& cause) {
  --peerOf(operation.peer).inFlight;
  if (operation.kind == PostedOperation::Kind::Put) --operation.put->inFlight;
  const char* const what =
      operation.kind == PostedOperation::Kind::Put ? "a put" : "a control message";
  fail(operation.peer, fmt::format("{} to it failed: {}", what, cause));
}

void FabricTransport::onReceived(Bytes message) {
  const auto kind = readStruct<MessageKind>(message);
  if (kind == MessageKind::Control) {
    if (const auto header = readStruct<FabricControlHeader>(message)) {
      const PeerId from = knownPeer(header->sender);
      if (!isGenuine(from, header->sender, header->proof)) return;
      if (from >= 0 && peerOf(from).failed) return;
      return earlyMessages_.arrived(header->sender, header->sequence,
                                    message.subspan(sizeof(*header)), *sink_);
    }
  }
  if (kind == MessageKind::Fragment && endpoint_->protocol() == Protocol::Send) {
    if (const auto fragment = readStruct<FragmentHeader>(message)) {
      const PeerId from = knownPeer(fragment->sender);
      if (!isGenuine(from, fragment->sender, fragment->proof)) return;
      return receiveFragment(from, *fragment, message.subspan(sizeof(*fragment)));
    }
  }
  SMDDP_LOG(Debug, kTag, "dropped {} bytes that are not a message of smddp", message.size());
}

void FabricTransport::receiveFragment(PeerId from, const FragmentHeader& fragment, Bytes bytes) {
  try {
    if (reassembly_.accept(fragment, bytes)) sink_->onPut(fragment.immediate);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::Transport) throw;
    if (from >= 0) return fail(from, error.what());
    SMDDP_LOG(Debug, kTag, "unknown sender {:016x}: {}", fragment.sender, error.what());
  }
}

void FabricTransport::fail(PeerId id, const std::string& cause) {
  Peer& peer = peerOf(id);
  if (std::exchange(peer.failed, true)) return;
  peer.controls.clear();
  peer.puts.clear();
  if (shortage_.empty() && lacksDescriptors()) shortage_ = cause;
  failures_.emplace_back(id, cause);
}

size_t FabricTransport::reportFailures() {
  if (!shortage_.empty()) {
    raise(ErrorKind::Resource,
          "no file descriptor is left for a connection ({}); raise the limit of open files (ulimit "
          "-n)",
          std::exchange(shortage_, ""));
  }
  const auto failures = std::exchange(failures_, {});
  for (const auto& [peer, cause] : failures) sink_->onPeerFailed(peer, cause);
  return failures.size();
}

std::string FabricTransport::describe() const {
  const uint32_t version = library().version();
  // The sockets of such a provider are not ours.
  const std::string& provider = endpoint_->provider().provider;
  const bool isTcp = provider.starts_with("tcp") || provider == "net" || provider == "sockets";
  return fmt::format(
      "libfabric {}.{}, {}, {}{}", FI_MAJOR(version), FI_MINOR(version),
      fabric::describe(endpoint_->provider(), endpoint_->protocol(), why_),
      endpoint_->waitDescriptor() >= 0 ? "waits on a descriptor" : "waits by polling",
      isTcp ? ", " + CongestionChooser("system").describe() : "");
}

}  // namespace smddp::transport::fabric
