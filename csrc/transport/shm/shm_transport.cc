#include "transport/shm/shm_transport.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "common/error.h"
#include "common/stream_copy.h"
#include "transport/shm/doorbell.h"
#include "transport/shm/liveness.h"

namespace smddp::transport::shm {
namespace {

// A mate's ring table. Null if the offset that it published is impossible.
RingTable* ringTableOf(const Mate& mate) {
  const uint64_t offset = mate.page().ringsOffset.load(std::memory_order_acquire);
  const bool fits = offset >= sizeof(ProcessPage) && offset % alignof(RingTable) == 0 &&
                    mate.size() >= sizeof(RingTable) && offset <= mate.size() - sizeof(RingTable);
  return fits ? reinterpret_cast<RingTable*>(mate.data() + offset) : nullptr;
}

}  // namespace

ShmTransport::ShmTransport(std::shared_ptr<Slab> slab, StagingStores stores)
    : slab_(std::move(slab)), stagingStores_(stores) {
  ProcessPage& page = slab_->page();
  SMDDP_CHECK(page.ringsGeneration.load() % 2 == 0, "the slab has a transport already");
  if (const uint64_t offset = page.ringsOffset.load(); offset != 0) {
    rings_ = reinterpret_cast<RingTable*>(slab_->data() + offset);
  } else {
    const auto memory = slab_->allocate(sizeof(RingTable));
    rings_ = reinterpret_cast<RingTable*>(memory.data());
    slab_->commit(memory.first(sizeof(RingTable) - sizeof(RingTable::rings)));
    page.ringsOffset.store(slab_->offsetOf(rings_), std::memory_order_release);
  }
  generation_ = page.ringsGeneration.fetch_add(1, std::memory_order_acq_rel) + 1;
}

ShmTransport::~ShmTransport() {
  // First close the rings, then change the generation. Peers look at the generation first, so they still see our last
  // records.
  for (const auto& peer : peers_) close(*peer);
  slab_->page().ringsGeneration.fetch_add(1, std::memory_order_acq_rel);
  for (const auto& peer : peers_) {
    if (peer->mate && !peer->failed) Doorbell::ring(*peer->mate);
  }
}

std::vector<std::byte> ShmTransport::address() const {
  const Address address{slab_->address(), generation_, 0};
  const auto bytes = std::as_bytes(std::span(&address, 1));
  return {bytes.begin(), bytes.end()};
}

PeerId ShmTransport::connect(Bytes bytes, const std::string& description) {
  auto peer = std::make_unique<Peer>();
  if (bytes.size() != sizeof peer->address) {
    raise(ErrorKind::Transport, "the memory address of {} has {} bytes, not {}", description,
          bytes.size(), sizeof peer->address);
  }
  std::memcpy(&peer->address, bytes.data(), bytes.size());
  peer->id = static_cast<PeerId>(peers_.size());
  peer->stores = StoreChoice(stagingStores_);
  attach(*peer);
  peers_.push_back(std::move(peer));
  // The peer may have claimed its ring before we knew it: make the next poll() look again.
  claimsSeen_ = rings_->claims.load(std::memory_order_acquire) - 1;
  return peers_.back()->id;
}

// If a peer cannot be reached, that peer has failed. If this process lacks resources to reach any peer, this throws.
void ShmTransport::attach(Peer& peer) {
  try {
    peer.mate = Mate::attach(peer.address.slab);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::Transport) throw;
    peer.trouble = error.what();
    return;
  }
  // Back one ring for each peer before a peer writes to it. Peers claim low rings first.
  const size_t index = std::min<size_t>(peers_.size(), RingTable::kRings - 1);
  slab_->commit(std::as_writable_bytes(std::span(&rings_->rings[index], 1)));
  peer.rings = ringTableOf(*peer.mate);
  if (peer.rings != nullptr) peer.outgoing = claimRing(*peer.rings, peer.address.generation);
  if (peer.outgoing == nullptr) {
    peer.trouble = fmt::format(
        "no ring is free in its shared memory; a node has at most {} processes", RingTable::kRings);
  }
}

Ring* ShmTransport::claimRing(RingTable& table, uint32_t receiverGeneration) const {
  for (Ring& ring : table.rings) {
    RingClaim& claim = table.claim(ring);
    RingState expected = RingState::Free;
    if (claim.state.load(std::memory_order_relaxed) != expected ||
        !claim.state.compare_exchange_strong(expected, RingState::Claiming,
                                             std::memory_order_acq_rel)) {
      continue;
    }
    claim.sender = slab_->address().nonce;
    claim.senderGeneration = generation_;
    claim.receiverGeneration = receiverGeneration;
    claim.state.store(RingState::Open, std::memory_order_release);
    table.claims.fetch_add(1, std::memory_order_acq_rel);
    return &ring;
  }
  return nullptr;
}

RemoteKey ShmTransport::registerMemory(std::span<std::byte> memory) {
  const uint64_t offset = slab_->offsetOf(memory.data());
  SMDDP_CHECK(memory.size() <= slab_->size() - offset, "{} bytes reach beyond the slab",
              memory.size());
  return {offset, memory.size()};
}

bool ShmTransport::roomFor(Peer& peer, uint64_t payload) {
  if (peer.failed || !peer.trouble.empty()) return false;
  std::optional<bool> room = peer.outgoing->hasRoom(payload);
  if (room == false) {
    // Ask to be woken, and check again: the peer may have made room before it could see that.
    peer.outgoing->refused.store(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    room = peer.outgoing->hasRoom(payload);
  }
  if (!room) peer.trouble = "it corrupted its ring of messages";
  return room.value_or(false);
}

bool ShmTransport::control(PeerId id, Bytes message) {
  SMDDP_CHECK(message.size() <= kMaxControlBytes, "a control message of {} bytes", message.size());
  Peer& peer = *peers_.at(id);
  if (!roomFor(peer, message.size())) return false;
  peer.outgoing->push({RecordKind::Control, static_cast<uint32_t>(message.size()), 0, 0}, message);
  Doorbell::ring(*peer.mate);
  return true;
}

bool ShmTransport::put(PeerId id, const RemoteSlot& slot, uint32_t immediate, Bytes header,
                       Payload payload, uint64_t token) {
  SMDDP_CHECK(header.size() == kHeaderBytes, "a header of {} bytes", header.size());
  SMDDP_CHECK(!payload.onDevice, "a put from memory of a device");
  Peer& peer = *peers_.at(id);
  if (!roomFor(peer, 0)) return false;
  // The peer named the slot. A wrong one must not make us write to its control page, or outside of its slab.
  const auto [begin, length] = slot.target;
  const uint64_t bytes = kHeaderBytes + payload.size();
  const uint64_t size = peer.mate->size();
  if (begin < sizeof(ProcessPage) || begin > size || length > size - begin || bytes > length ||
      slot.offset > length - bytes) {
    peer.trouble =
        fmt::format("it granted a slot that does not lie in its memory: {} bytes at {} of {} at {}",
                    bytes, slot.offset, length, begin);
    return false;
  }
  std::byte* target = peer.mate->data() + begin + slot.offset;
  std::memcpy(target, header.data(), kHeaderBytes);
  const auto write = [&](bool streams) {
    if (streams) {
      streamCopy(target + kHeaderBytes, payload.data(), payload.size());
    } else {
      std::memcpy(target + kHeaderBytes, payload.data(), payload.size());
    }
  };
  if (std::ssize(payload) >= StoreChoice::kLongBytes) {
    peer.stores.write(nullptr, std::ssize(payload), write);
  } else if (!payload.empty()) {
    write(false);
  }
  peer.outgoing->push({RecordKind::Put, 0, immediate, 0}, {});
  done_.push_back(token);
  Doorbell::ring(*peer.mate);
  return true;
}

size_t ShmTransport::poll(Sink& sink) {
  size_t events = 0;
  reporting_.clear();
  reporting_.swap(done_);
  for (const uint64_t token : reporting_) sink.onPutDone(token);
  events += reporting_.size();
  if (rings_->claims.load(std::memory_order_acquire) != claimsSeen_) findIncoming();
  // By index: a sink may connect() further peers.
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (!peers_[i]->failed) events += pollPeer(*peers_[i], sink);
  }
  return events;
}

// Matches rings with peers, and frees closed rings of earlier incarnations.
void ShmTransport::findIncoming() {
  claimsSeen_ = rings_->claims.load(std::memory_order_acquire);
  for (Ring& ring : rings_->rings) {
    const RingClaim& claim = rings_->claim(ring);
    const RingState state = claim.state.load(std::memory_order_acquire);
    if (state != RingState::Open && state != RingState::Closed) continue;
    const bool ours = claim.receiverGeneration == generation_;
    if (!ours && state == RingState::Closed) release(ring);
    if (!ours) continue;
    const auto sender = std::find_if(peers_.begin(), peers_.end(), [&](const auto& peer) {
      return peer->address.slab.nonce == claim.sender &&
             peer->address.generation == claim.senderGeneration;
    });
    // An unknown sender: its messages wait in the ring until connect().
    if (sender == peers_.end()) continue;
    if (!(*sender)->failed) {
      (*sender)->incoming = &ring;
    } else if (isOver(**sender, ring)) {
      release(ring);
    }
  }
}

// Whether the peer writes no more to its ring.
bool ShmTransport::isOver(const Peer& peer, const Ring& ring) const {
  return rings_->claim(ring).state.load(std::memory_order_acquire) == RingState::Closed ||
         lifeOf(*peer.mate) == Life::Died;
}

size_t ShmTransport::pollPeer(Peer& peer, Sink& sink) {
  // Check this before draining the ring, so that everything it wrote before it went is still delivered.
  const std::string gone = peer.trouble.empty() ? goneBecause(peer) : std::string();
  // It may have claimed its ring since the last look, before it went.
  if (!gone.empty() && peer.incoming == nullptr) findIncoming();
  size_t events = peer.incoming != nullptr ? drain(peer, sink) : 0;
  const std::string& cause = peer.trouble.empty() ? gone : peer.trouble;
  if (cause.empty()) return events;
  peer.failed = true;
  close(peer);
  if (peer.incoming != nullptr && isOver(peer, *peer.incoming)) release(*peer.incoming);
  peer.incoming = nullptr;
  sink.onPeerFailed(peer.id, cause);
  return events + 1;
}

size_t ShmTransport::drain(Peer& peer, Sink& sink) {
  Ring& ring = *peer.incoming;
  uint64_t tail = ring.tail.load(std::memory_order_relaxed);
  const uint64_t head = ring.head.load(std::memory_order_acquire);
  if (head == tail) return 0;
  size_t events = 0;
  // Drain only up to this `head`, so that a busy peer does not delay the others.
  while (head != tail && peer.trouble.empty()) {
    uint64_t consumed = 0;
    if (!deliver(peer, tail, head - tail, sink, consumed)) {
      peer.trouble = "it corrupted its ring of messages";
      break;
    }
    tail += consumed;
    ring.tail.store(tail, std::memory_order_release);
    ++events;
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (ring.refused.load(std::memory_order_relaxed) != 0 && ring.refused.exchange(0) != 0 &&
      peer.mate) {
    Doorbell::ring(*peer.mate);
  }
  return events;
}

// Delivers one record. Copies it before the check, because the writer could change it in between.
bool ShmTransport::deliver(Peer& peer, uint64_t at, uint64_t available, Sink& sink,
                           uint64_t& consumed) {
  RecordHeader header;
  if (available > Ring::kBytes || available < sizeof header) return false;
  peer.incoming->copyOut(at, std::as_writable_bytes(std::span(&header, 1)));
  if (header.bytes > kMaxControlBytes || Ring::recordBytes(header.bytes) > available) return false;
  consumed = Ring::recordBytes(header.bytes);
  switch (header.kind) {
    case RecordKind::Control: {
      std::array<std::byte, kMaxControlBytes> message;
      const std::span<std::byte> used(message.data(), header.bytes);
      peer.incoming->copyOut(at + sizeof header, used);
      sink.onControl(peer.id, used);
      return true;
    }
    case RecordKind::Put: sink.onPut(header.immediate); return header.bytes == 0;
  }
  return false;
}

// The reason why the peer is gone; empty if it is not.
std::string ShmTransport::goneBecause(Peer& peer) const {
  const bool running = lifeOf(*peer.mate) == Life::Running;
  const ProcessPage& page = peer.mate->page();
  if (running && page.ringsGeneration.load(std::memory_order_acquire) == peer.address.generation)
    return {};
  return running ? "it has shut smddp down; its process may have ended" : describeLife(*peer.mate);
}

// Closes the ring on which we send. From here on it belongs to the receiver, which may give it to another sender.
void ShmTransport::close(Peer& peer) {
  Ring* const ring = std::exchange(peer.outgoing, nullptr);
  if (ring != nullptr) {
    peer.rings->claim(*ring).state.store(RingState::Closed, std::memory_order_release);
  }
}

// Frees a ring. Only the consumer may do that, and only if the producer has closed the ring or died.
void ShmTransport::release(Ring& ring) {
  ring.head.store(0, std::memory_order_relaxed);
  ring.tail.store(0, std::memory_order_relaxed);
  ring.refused.store(0, std::memory_order_relaxed);
  rings_->claim(ring).state.store(RingState::Free, std::memory_order_release);
}

std::string ShmTransport::describe() const {
  return fmt::format("shared memory: {} KiB rings in memfd segments, woken by futex",
                     Ring::kBytes / 1024);
}

}  // namespace smddp::transport::shm
