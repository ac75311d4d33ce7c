#include "engine/plans/channels.h"

#include <algorithm>
#include <set>

#include "common/config.h"
#include "common/error.h"
#include "common/log.h"

namespace smddp::engine::plans {
namespace {

// The track number of the channels for messages. Operations have lower ones.
constexpr uint8_t kMessageTrack = 255;
static_assert(kMostInFlight <= kMessageTrack && kMostWindow <= transport::kMaxWindow);
constexpr int64_t kMessageWindow = 4;
// Payload bytes of a message between two ranks. Between nodes a switch between two processes costs more than what a
// longer message takes out of the caches.
constexpr int64_t kMateMessageBytes = 64 << 10;
constexpr int64_t kMessageBytes = 256 << 10;

}  // namespace

Channels::Channels(process::Process& process, const team::Membership& membership,
                   const plan::Limits& limits)
    : process_(process),
      pool_(process.memory().windows),
      membership_(membership),
      limits_(limits) {}

Channels::~Channels() {
  if (!mayGiveBack_) return;
  for (const Window& window : windows_) pool_->giveBack(window.memory);
}

void Channels::open(team::Track& track, const CachedPlan& cached) {
  process_.ownership().assertOwned();
  const auto number = static_cast<uint8_t>(track.index);
  for (size_t i = 0; i < cached.plan.channels.size(); ++i) {
    const plan::ChannelUse& use = cached.plan.channels[i];
    const int64_t longest = cached.longestMessage[i];
    auto ends = track.find(use.peer, use.stream, longest);
    if (ends == track.channels.end()) {
      track.channels.push_back(
          {.peer = use.peer, .stream = use.stream, .isShort = longest <= team::kShortSlotBytes});
      ends = std::prev(track.channels.end());
    }
    const int64_t slotBytes = ends->isShort ? std::min(team::kShortSlotBytes, limits_.messageBytes)
                                            : limits_.messageBytes;
    // With 4 streams, the channels with long slots have numbers 0 to 3, those with short slots 4 to 7.
    const auto subchannel =
        static_cast<uint8_t>(use.stream + (ends->isShort ? plan::kNumStreams : 0));
    if (use.puts > 0 && ends->send == nullptr) {
      process::Peer& peer = peerOf(use.peer);
      ends->send = &peer.table->send(
          membership_.channelKey(membership_.me(), use.peer, number, subchannel), peer.id);
    }
    if (use.receives > 0 && ends->receive == nullptr) {
      ends->receive = &openReceiver(use.peer, number, subchannel, limits_.window, slotBytes);
    }
  }
}

transport::ReceiveChannel& Channels::openReceiver(Rank from, uint8_t track, uint8_t subchannel,
                                                  int64_t window, int64_t messageBytes) {
  process::Peer& peer = peerOf(from);
  const auto memory =
      pool_->take(static_cast<size_t>(window * transport::slotStride(messageBytes)));
  windows_.push_back({memory, from});
  const auto key = process_.registerMemory(peer, memory);
  return peer.table->receive(membership_.channelKey(from, membership_.me(), track, subchannel),
                             peer.id, memory, key, messageBytes, window);
}

void Channels::sendGrantsNow(const team::Track& track) {
  const auto receives = [](const team::ChannelEnds& ends) { return ends.receive != nullptr; };
  // All peers on other nodes share one table.
  const auto any = std::find_if(track.channels.begin(), track.channels.end(), receives);
  if (any != track.channels.end()) peerOf(any->peer).table->sendGrantsNow();
}

transport::SendChannel& Channels::messageSender(Rank to) {
  process::Peer& peer = peerOf(to);
  return peer.table->send(membership_.channelKey(membership_.me(), to, kMessageTrack, 0), peer.id);
}

transport::ReceiveChannel& Channels::messageReceiver(Rank from) {
  auto& channel = messageReceivers_[from];
  if (channel == nullptr) {
    channel = &openReceiver(from, kMessageTrack, 0, kMessageWindow,
                            peerOf(from).mate ? kMateMessageBytes : kMessageBytes);
  }
  return *channel;
}

void Channels::control(Rank to, transport::Bytes message) {
  process_.ownership().assertOwned();
  peerOf(to).table->control(peerOf(to).id, message);
}

void Channels::tell(Rank to, transport::Bytes message) {
  try {
    control(to, message);
  } catch (const Error& error) {
    SMDDP_LOG(Debug, "engine", "rank {} is not told: {}", to, error.what());
  }
}

void Channels::close() {
  process_.ownership().assertOwned();
  std::set<transport::ChannelTable*> tables;
  for (const process::Peer* peer : membership_.peers) {
    if (peer != nullptr) tables.insert(peer->table);
  }
  for (transport::ChannelTable* table : tables) table->closeGroup(membership_.group);
}

void Channels::allowGiveBack() {
  process_.ownership().assertOwned();
  std::erase_if(windows_, [&](const Window& window) {
    const process::Peer& from = peerOf(window.from);
    return !from.mate && from.lost && !isDrained(window.from);
  });
  mayGiveBack_ = true;
}

}  // namespace smddp::engine::plans
