#include "transport/striped_transport.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "common/error.h"

namespace smddp::transport {
namespace {

constexpr size_t kMostCards = kMaxControlBytes / sizeof(RemoteKey);
// A failed peer is reported after at most this many polls, also if events keep coming.
constexpr int kLastPolls = 64;

// Splits an address: a list of | length, 2 bytes | address of a card |.
std::vector<Bytes> split(Bytes address, const std::string& description) {
  std::vector<Bytes> parts;
  while (!address.empty()) {
    uint16_t length = 0;
    if (address.size() >= sizeof length) std::memcpy(&length, address.data(), sizeof length);
    if (length == 0 || length > address.size() - sizeof length) {
      raise(ErrorKind::Transport, "the network address of {} is malformed", description);
    }
    parts.push_back(address.subspan(sizeof length, length));
    address = address.subspan(sizeof length + length);
  }
  if (parts.empty()) raise(ErrorKind::Transport, "{} has no network address", description);
  return parts;
}

FileDescriptor combineDescriptors(const std::vector<std::unique_ptr<Transport>>& cards) {
  FileDescriptor all(epoll_create1(EPOLL_CLOEXEC));
  for (const auto& card : cards) {
    epoll_event event{};
    event.events = EPOLLIN;
    const int descriptor = card->waitDescriptor();
    // All cards must have a descriptor. Otherwise a sleeper would miss the events of a card.
    if (descriptor < 0 || epoll_ctl(all.get(), EPOLL_CTL_ADD, descriptor, &event) != 0) return {};
  }
  return all;
}

}  // namespace

// The sink of one card during a poll.
class StripedTransport::CardSink final : public Sink {
 public:
  CardSink(StripedTransport& owner, size_t card, Sink& sink)
      : owner_(owner), card_(card), sink_(sink) {}
  void onControl(PeerId from, Bytes message) override {
    if (card_ == 0) return sink_.onControl(from, message);
    owner_.onAnnouncement(owner_.peerAt_[card_].at(from), message);
  }
  void onPut(uint32_t immediate) override { sink_.onPut(immediate); }
  std::span<std::byte> placeFor(PeerId from, uint32_t immediate, size_t payloadBytes) override {
    return sink_.placeFor(owner_.peerAt_[card_].at(from), immediate, payloadBytes);
  }
  void onPutDone(uint64_t token) override { sink_.onPutDone(token); }
  void onPeerFailed(PeerId peer, const std::string& cause) override {
    owner_.fail(owner_.peerAt_[card_].at(peer), cause);
  }

 private:
  StripedTransport& owner_;
  const size_t card_;
  Sink& sink_;
};

StripedTransport::StripedTransport(std::vector<std::unique_ptr<Transport>> cards)
    : cards_(std::move(cards)), peerAt_(cards_.size()), wait_(combineDescriptors(cards_)) {
  SMDDP_CHECK(!cards_.empty() && cards_.size() <= kMostCards, "{} network cards", cards_.size());
}

StripedTransport::~StripedTransport() = default;

std::vector<std::byte> StripedTransport::address() const {
  std::vector<std::byte> whole;
  for (const auto& card : cards_) {
    const std::vector<std::byte> part = card->address();
    const auto length = static_cast<uint16_t>(part.size());
    const auto* bytes = reinterpret_cast<const std::byte*>(&length);
    whole.insert(whole.end(), bytes, bytes + sizeof length);
    whole.insert(whole.end(), part.begin(), part.end());
  }
  return whole;
}

PeerId StripedTransport::connect(Bytes address, const std::string& description) {
  const std::vector<Bytes> parts = split(address, description);
  std::vector<PeerId> at;
  for (size_t card = 0; card < std::min(parts.size(), cards_.size()); ++card) {
    at.push_back(cards_[card]->connect(parts[card], description));
  }
  const PeerId id = at.front();
  for (size_t card = 0; card < at.size(); ++card) peerAt_[card][at[card]] = id;
  peers_[id].at = std::move(at);
  announce();
  return id;
}

RemoteKey StripedTransport::registerMemory(std::span<std::byte> memory) {
  Keys keys;
  for (const auto& card : cards_) keys.push_back(card->registerMemory(memory));
  const RemoteKey first = keys.front();
  if (std::find(regions_.begin(), regions_.end(), keys) == regions_.end()) {
    regions_.push_back(std::move(keys));
    announce();
  }
  return first;
}

bool StripedTransport::addSource(std::span<std::byte> memory) {
  bool registered = false;
  for (const auto& card : cards_) registered |= card->addSource(memory);
  return registered;
}

// Adds the memory on all cards, or on none.
std::string StripedTransport::addDeviceSource(const DeviceMemory& memory) {
  std::string refusal;
  try {
    for (const auto& card : cards_) {
      if (refusal.empty()) refusal = card->addDeviceSource(memory);
    }
  } catch (...) {
    removeDeviceSource(memory.bytes);
    throw;
  }
  if (!refusal.empty()) removeDeviceSource(memory.bytes);
  return refusal;
}

void StripedTransport::removeDeviceSource(std::span<std::byte> memory) {
  for (const auto& card : cards_) card->removeDeviceSource(memory);
}

StripedTransport::Peer& StripedTransport::peerOf(PeerId peer) {
  const auto found = peers_.find(peer);
  SMDDP_CHECK(found != peers_.end(), "no peer {}", peer);
  return found->second;
}

// Announces regions to the peers. If a card has no room, a later poll announces the rest.
void StripedTransport::announce() {
  for (auto& [id, peer] : peers_) {
    if (peer.at.size() < 2 || peer.failed) continue;
    for (; peer.announced < regions_.size(); ++peer.announced) {
      const auto message = std::as_bytes(std::span(regions_[peer.announced]));
      if (!cards_[1]->control(peer.at[1], message)) break;
    }
  }
}

void StripedTransport::onAnnouncement(PeerId id, Bytes message) {
  Peer& peer = peerOf(id);
  Keys keys(message.size() / sizeof(RemoteKey));
  if (message.size() % sizeof(RemoteKey) != 0 || keys.size() < peer.at.size()) {
    return fail(id, "it announces memory in a message that is malformed");
  }
  std::memcpy(keys.data(), message.data(), message.size());
  const std::pair first{keys.front().address, keys.front().key};
  peer.regions[first] = std::move(keys);
}

bool StripedTransport::control(PeerId peer, Bytes message) {
  return cards_.front()->control(peer, message);
}

// Puts over the next card that has room.
bool StripedTransport::put(PeerId id, const RemoteSlot& slot, uint32_t immediate, Bytes header,
                           Payload payload, uint64_t token) {
  Peer& peer = peerOf(id);
  const auto known = peer.regions.find({slot.target.address, slot.target.key});
  if (known == peer.regions.end()) {
    return cards_.front()->put(id, slot, immediate, header, payload, token);
  }
  for (size_t tried = 0; tried < peer.at.size(); ++tried) {
    const size_t card = peer.nextCard;
    peer.nextCard = (card + 1) % peer.at.size();
    const RemoteSlot there{known->second[card], slot.offset};
    if (cards_[card]->put(peer.at[card], there, immediate, header, payload, token)) return true;
  }
  return false;
}

void StripedTransport::withdraw(std::span<std::byte> memory) {
  for (const auto& card : cards_) card->withdraw(memory);
}

bool StripedTransport::isDelivered(PeerId id) const {
  const std::vector<PeerId>& at = peers_.at(id).at;
  for (size_t card = 0; card < at.size(); ++card) {
    if (!cards_[card]->isDelivered(at[card])) return false;
  }
  return true;
}

size_t StripedTransport::poll(Sink& sink) {
  announce();
  size_t numEvents = 0;
  for (size_t card = 0; card < cards_.size(); ++card) {
    CardSink cardSink(*this, card, sink);
    numEvents += cards_[card]->poll(cardSink);
  }
  return numEvents + reportFailures(sink, numEvents == 0);
}

void StripedTransport::fail(PeerId id, const std::string& cause) {
  Peer& peer = peerOf(id);
  if (std::exchange(peer.failed, true)) return;
  failures_.push_back({id, cause});
}

size_t StripedTransport::reportFailures(Sink& sink, bool quiet) {
  std::vector<Failure> later;
  size_t numReported = 0;
  for (Failure& failure : std::exchange(failures_, {})) {
    if (quiet || ++failure.polls >= kLastPolls) {
      ++numReported;
      sink.onPeerFailed(failure.peer, failure.cause);
    } else {
      later.push_back(std::move(failure));
    }
  }
  failures_.insert(failures_.end(), later.begin(), later.end());
  return numReported;
}

bool StripedTransport::prepareWait() {
  bool ready = failures_.empty();
  for (const auto& card : cards_) ready &= card->prepareWait();
  return ready;
}

std::string StripedTransport::describe() const {
  std::string text = fmt::format("puts dealt to {} cards in turn", cards_.size());
  for (const auto& card : cards_) text += "; " + card->describe();
  return text;
}

}  // namespace smddp::transport
