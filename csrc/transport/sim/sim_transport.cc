#include "transport/sim/sim_transport.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/error.h"

namespace smddp::transport::sim {

SimTransport::~SimTransport() { network_.remove(endpoint_); }

std::vector<std::byte> SimTransport::address() const {
  std::vector<std::byte> address(sizeof(endpoint_));
  std::memcpy(address.data(), &endpoint_, sizeof(endpoint_));
  return address;
}

PeerId SimTransport::connect(Bytes address, const std::string& description) {
  int endpoint = -1;
  if (address.size() == sizeof(endpoint)) std::memcpy(&endpoint, address.data(), sizeof(endpoint));
  if (endpoint < 0 || static_cast<size_t>(endpoint) >= network_.endpoints_.size()) {
    raise(ErrorKind::Transport, "{}: the address of {} is not of this simulated network", name_,
          description);
  }
  if (const auto known = peerOf_.find(endpoint); known != peerOf_.end()) return known->second;
  const auto peer = static_cast<PeerId>(peers_.size());
  peers_.push_back(endpoint);
  peerOf_.emplace(endpoint, peer);
  if (auto early = strangers_.extract(endpoint)) {
    for (auto& message : early.mapped()) onControl(endpoint, std::move(message));
  }
  return peer;
}

RemoteKey SimTransport::registerMemory(std::span<std::byte> memory) {
  for (size_t i = 0; i < regions_.size(); ++i) {
    const auto& known = regions_[i].memory;
    if (known.data() == memory.data() && known.size() == memory.size()) return {i, regions_[i].key};
    // A network card would go on writing to the old pages.
    SMDDP_CHECK(known.data() + known.size() <= memory.data() ||
                    memory.data() + memory.size() <= known.data(),
                "{} registers memory anew that was something else", name_);
  }
  regions_.push_back({network_.random_.next(), memory});
  return {regions_.size() - 1, regions_.back().key};
}

std::span<std::byte> SimTransport::locate(const RemoteSlot& slot, size_t length) const {
  const auto& [address, key] = slot.target;
  if (address >= regions_.size() || regions_[address].key != key) {
    raise(ErrorKind::Transport, "a put names memory that {} did not register", name_);
  }
  const std::span<std::byte> memory = regions_[address].memory;
  if (slot.offset > memory.size() || length > memory.size() - slot.offset) {
    raise(ErrorKind::Transport, "a put of {} bytes at {} leaves a region of {} bytes of {}", length,
          slot.offset, memory.size(), name_);
  }
  return memory.subspan(slot.offset, length);
}

int SimTransport::endpointOf(PeerId peer) const {
  SMDDP_CHECK(peer >= 0 && static_cast<size_t>(peer) < peers_.size(), "{}: no peer {}", name_,
              peer);
  return peers_[static_cast<size_t>(peer)];
}

bool SimTransport::control(PeerId peer, Bytes message) {
  SMDDP_CHECK(message.size() <= kMaxControlBytes, "a control message of {} bytes", message.size());
  return !killed_ && network_.control(endpoint_, endpointOf(peer), message);
}

bool SimTransport::put(PeerId peer, const RemoteSlot& slot, uint32_t immediate, Bytes header,
                       Payload payload, uint64_t token) {
  SMDDP_CHECK(header.size() == kHeaderBytes, "a header of {} bytes", header.size());
  SMDDP_CHECK(!payload.onDevice, "a put from memory of a device");
  return !killed_ &&
         network_.put(endpoint_, endpointOf(peer), slot, immediate, header, payload, token);
}

size_t SimTransport::poll(Sink& sink) {
  if (killed_) return 0;
  // The sink's calls may add arrivals; those are for the next poll.
  const std::deque<Arrival> arrivals = std::exchange(arrivals_, {});
  for (const Arrival& a : arrivals) {
    switch (a.kind) {
      case Arrival::Kind::Control: sink.onControl(a.peer, a.bytes); break;
      case Arrival::Kind::Put: {
        const auto immediate = static_cast<uint32_t>(a.value);
        if (!a.bytes.empty()) {
          const auto place = sink.placeFor(a.peer, immediate, a.bytes.size());
          if (!place.empty()) std::ranges::copy(a.bytes, place.begin());
        }
        sink.onPut(immediate);
        break;
      }
      case Arrival::Kind::PutDone: sink.onPutDone(a.value); break;
      case Arrival::Kind::PeerFailed:
        sink.onPeerFailed(a.peer, {reinterpret_cast<const char*>(a.bytes.data()), a.bytes.size()});
        break;
    }
  }
  return arrivals.size();
}

void SimTransport::onControl(int from, std::vector<std::byte> message) {
  if (const auto known = peerOf_.find(from); known != peerOf_.end()) {
    arrivals_.push_back({Arrival::Kind::Control, known->second, 0, std::move(message)});
  } else {
    strangers_[from].push_back(std::move(message));
  }
}

// Half of the payloads may go elsewhere than to their slots.
void SimTransport::onPut(int from, uint32_t immediate, Bytes payload) {
  Arrival arrival{Arrival::Kind::Put, 0, immediate, {}};
  const auto known = peerOf_.find(from);
  if (known != peerOf_.end() && network_.random_.chance(0.5)) {
    arrival.peer = known->second;
    arrival.bytes.assign(payload.begin(), payload.end());
  }
  arrivals_.push_back(std::move(arrival));
}

void SimTransport::onPeerFailed(int endpoint, const std::string& cause) {
  const auto known = peerOf_.find(endpoint);
  if (known == peerOf_.end()) return;
  const auto* text = reinterpret_cast<const std::byte*>(cause.data());
  arrivals_.push_back({Arrival::Kind::PeerFailed, known->second, 0, {text, text + cause.size()}});
}

std::string SimTransport::describe() const {
  return fmt::format("simulated network, endpoint {} ({})", endpoint_, name_);
}

}  // namespace smddp::transport::sim
