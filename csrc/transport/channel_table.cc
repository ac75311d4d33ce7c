#include "transport/channel_table.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "common/error.h"
#include "common/log.h"

namespace smddp::transport {
namespace {

constexpr uint32_t kNumIds = 1u << 16;

ChannelKey keyOf(const OpenMessage& m) {
  return {m.group, m.track, m.subchannel, m.source, m.destination};
}

}  // namespace

SendChannel& ChannelTable::send(const ChannelKey& key, PeerId peer) {
  SMDDP_CHECK(!closedGroups_.contains(key.group), "{} after closeGroup()", toString(key));
  if (const auto known = sendByKey_.find(key); known != sendByKey_.end()) {
    SMDDP_CHECK(known->second->peer_ == peer, "{} has another peer", toString(key));
    return *known->second;
  }
  const uint32_t serial = ++lastSerial_;
  std::unique_ptr<SendChannel> made(new SendChannel(transport_, key, peer, serial));
  SendChannel& channel = *made;
  sending_.emplace(serial, std::move(made));
  ++numChannels_[{key.group, peer}];
  sendByKey_.emplace(key, &channel);
  if (const auto kept = keptOpens_.find(key); kept != keptOpens_.end()) {
    const KeptOpen open = kept->second;
    keptOpens_.erase(kept);
    bind(channel, open.from, open.message);
  }
  return channel;
}

ReceiveChannel& ChannelTable::receive(const ChannelKey& key, PeerId peer,
                                      std::span<std::byte> memory, RemoteKey target,
                                      int64_t slotBytes, int64_t window) {
  SMDDP_CHECK(!closedGroups_.contains(key.group), "{} after closeGroup()", toString(key));
  if (const auto known = receiveByKey_.find(key); known != receiveByKey_.end()) {
    SMDDP_CHECK(known->second->peer_ == peer, "{} has another peer", toString(key));
    return *known->second;
  }
  SMDDP_CHECK(window >= 1 && window <= kMaxWindow && slotBytes >= 1 &&
                  static_cast<uint64_t>(slotBytes) <= kMaxSlotBytes,
              "{}: window of {} slots of {} bytes", toString(key), window, slotBytes);
  SMDDP_CHECK(memory.size() >= static_cast<uint64_t>(window * slotStride(slotBytes)),
              "{}: {} bytes for {} slots of {}", toString(key), memory.size(), window, slotBytes);
  const uint16_t id = newId();
  std::unique_ptr<ReceiveChannel> made(
      new ReceiveChannel(*this, key, peer, id, memory, slotBytes, window));
  ReceiveChannel& channel = *made;
  receiving_.emplace(id, std::move(made));
  ++numChannels_[{key.group, peer}];
  receiveByKey_.emplace(key, &channel);

  OpenMessage open;
  open.header.channel = id;
  open.group = key.group;
  open.source = key.source;
  open.destination = key.destination;
  open.track = key.track;
  open.subchannel = key.subchannel;
  open.window = static_cast<uint32_t>(window);
  open.slotBytes = static_cast<uint64_t>(slotBytes);
  open.target = target;
  control(peer, bytesOf(open));
  return channel;
}

uint16_t ChannelTable::newId() {
  // Reuse an id as late as possible, so that a late message for it does not meet another channel.
  if (freshIds_ < kNumIds) return static_cast<uint16_t>(freshIds_++);
  if (freeIds_.empty()) {
    raise(ErrorKind::Resource,
          "{} channels are open in this process; destroy process groups that are no longer used",
          kNumIds);
  }
  const uint16_t id = freeIds_.front();
  freeIds_.pop_front();
  return id;
}

void ChannelTable::control(PeerId peer, Bytes message) {
  SMDDP_CHECK(message.size() <= kMaxControlBytes, "a control message of {} bytes", message.size());
  if (failed_.contains(peer)) return;
  const auto waiting = outbox_.find(peer);
  if (waiting == outbox_.end() && transport_.control(peer, message)) return;
  outbox_[peer].emplace_back(message.begin(), message.end());
  ++backlog_;
}

void ChannelTable::sendBacklog() {
  // Order matters per peer only, so a peer without room does not hold up the others.
  for (auto box = outbox_.begin(); box != outbox_.end();) {
    auto& waiting = box->second;
    while (!waiting.empty() && transport_.control(box->first, waiting.front())) {
      waiting.pop_front();
      --backlog_;
    }
    box = waiting.empty() ? outbox_.erase(box) : std::next(box);
  }
}

void ChannelTable::noteOwed(ReceiveChannel& channel) {
  if (channel.grantIsDue() && sendGrant(channel)) return;
  if (channel.grantIsDue()) grantsDue_ = true;
  if (!channel.listed_) owing_.push_back(&channel);
  channel.listed_ = true;
}

bool ChannelTable::sendGrant(ReceiveChannel& channel) {
  GrantMessage grant;
  grant.header.channel = channel.id_;
  grant.group = channel.key_.group;
  grant.released = channel.released_;
  // A refused grant does not go to the outbox: a later grant covers more messages.
  const bool gone = failed_.contains(channel.peer_);
  if (!gone && !transport_.control(channel.peer_, bytesOf(grant))) return false;
  channel.granted_ = channel.released_;
  channel.unbatched_ = false;
  return true;
}

void ChannelTable::sendDueGrants() {
  grantsDue_ = false;
  std::erase_if(owing_, [this](ReceiveChannel* channel) {
    if (channel->grantIsDue() && !sendGrant(*channel)) grantsDue_ = true;
    channel->listed_ = channel->owed() != 0;
    return !channel->listed_;
  });
}

void ChannelTable::sendGrantsNow() {
  for (ReceiveChannel* channel : owing_) channel->unbatched_ = channel->owed() != 0;
  sendDueGrants();
}

size_t ChannelTable::poll() {
  if (backlog_ != 0) sendBacklog();
  const size_t events = transport_.poll(*this);
  if (backlog_ != 0) sendBacklog();
  if (grantsDue_) sendDueGrants();
  return events;
}

void ChannelTable::onControl(PeerId from, Bytes message) {
  if (failed_.contains(from)) return;
  const auto header = parseControlHeader(message);
  if (header && header->kind >= kFirstEngineKind) return above_.onControl(from, message);
  if (const auto open = parseOpen(message)) return onOpen(from, *open);
  if (const auto grant = parseGrant(message)) return onGrant(from, *grant);
  if (const auto close = parseClose(message)) return onClose(from, *close);
  if (parseAbort(message)) return above_.onControl(from, message);
  fail(from, fmt::format("it sent a control message that is not understood ({} bytes, kind {}); "
                         "all ranks must run the same smddp version",
                         message.size(), message.empty() ? -1 : int(message[0])));
}

void ChannelTable::onOpen(PeerId from, const OpenMessage& message) {
  const ChannelKey key = keyOf(message);
  SMDDP_LOG(Debug, "transport", "{} opened by its receiver: id {}, {} slots of {} bytes",
            toString(key), message.header.channel, message.window, message.slotBytes);
  if (closedGroups_.contains(key.group)) {
    return sendClose(from, message.header.channel, key.group, 0);
  }
  const auto known = sendByKey_.find(key);
  if (known == sendByKey_.end()) {
    keptOpens_.insert_or_assign(key, KeptOpen{from, message});
  } else {
    bind(*known->second, from, message);
  }
}

void ChannelTable::bind(SendChannel& channel, PeerId from, const OpenMessage& message) {
  if (channel.peer_ != from || channel.isOpen()) {
    return fail(from, fmt::format("it opened {}, which is {}", toString(channel.key_),
                                  channel.isOpen() ? "open already" : "another rank's"));
  }
  channel.onOpen(message);
  sendByRemoteId_[{from, message.header.channel}] = &channel;
}

void ChannelTable::onGrant(PeerId from, const GrantMessage& message) {
  const auto found = sendByRemoteId_.find({from, message.header.channel});
  if (found == sendByRemoteId_.end() || found->second->key_.group != message.group) {
    SMDDP_LOG(Debug, "transport", "grant for channel id {}, which is closed, ignored",
              message.header.channel);
    return;
  }
  SendChannel& channel = *found->second;
  if (message.released > channel.sent_ || message.released < channel.released_) {
    return fail(from, fmt::format("{}: it released {} messages after {}, {} were sent",
                                  toString(channel.key_), message.released, channel.released_,
                                  channel.sent_));
  }
  channel.released_ = message.released;
}

void ChannelTable::onClose(PeerId from, const CloseMessage& message) {
  const auto found = receiving_.find(message.header.channel);
  if (found == receiving_.end() || found->second->peer_ != from ||
      found->second->key_.group != message.group) {
    SMDDP_LOG(Debug, "transport", "close of channel id {}, which is not open, ignored",
              message.header.channel);
    return;
  }
  ReceiveChannel& channel = *found->second;
  channel.senderClosed_ = true;
  channel.sentBySender_ = message.sent;
  retireIfSettled(channel);
}

void ChannelTable::onPut(uint32_t immediate) {
  const auto found = receiving_.find(channelOf(immediate));
  if (found == receiving_.end()) {
    SMDDP_LOG(Debug, "transport", "arrival on channel id {}, which is closed, ignored",
              channelOf(immediate));
    return;
  }
  ReceiveChannel& channel = *found->second;
  channel.onPut(immediate);
  // poll() sends the grant after the transport's poll, together with those of other events.
  if (!channel.closed_ && channel.grantIsDue()) grantsDue_ = true;
  retireIfSettled(channel);
}

std::span<std::byte> ChannelTable::placeFor(PeerId from, uint32_t immediate, size_t payloadBytes) {
  const auto found = receiving_.find(channelOf(immediate));
  if (found == receiving_.end() || found->second->peer_ != from) return {};
  return found->second->placeFor(immediate, payloadBytes);
}

void ChannelTable::onPutDone(uint64_t token) {
  const auto found = sending_.find(static_cast<uint32_t>(token >> 32));
  if (found == sending_.end()) {
    SMDDP_LOG(Debug, "transport", "second completion of a put on a closed channel ignored");
    return;
  }
  SendChannel& channel = *found->second;
  channel.onPutDone(static_cast<uint32_t>(token));
  if (channel.closed_ && channel.flushed_ == channel.sent_) forget(sending_, channel.serial_);
}

void ChannelTable::onPeerFailed(PeerId peer, const std::string& cause) { fail(peer, cause); }

void ChannelTable::fail(PeerId peer, const std::string& cause) {
  if (!failed_.insert(peer).second) return;
  if (const auto waiting = outbox_.find(peer); waiting != outbox_.end()) {
    backlog_ -= waiting->second.size();
    outbox_.erase(waiting);
  }
  above_.onPeerFailed(peer, cause);
}

void ChannelTable::sendClose(PeerId peer, uint16_t remoteId, uint64_t group, uint64_t sent) {
  CloseMessage close;
  close.header.channel = remoteId;
  close.group = group;
  close.sent = sent;
  control(peer, bytesOf(close));
}

// Takes a channel out of sending_ or receiving_.
template <typename Channels, typename Number>
void ChannelTable::forget(Channels& channels, Number number) {
  const auto found = channels.find(number);
  const auto count = numChannels_.find({found->second->key().group, found->second->peer_});
  if (--count->second == 0) numChannels_.erase(count);
  channels.erase(found);
}

void ChannelTable::retireIfSettled(ReceiveChannel& channel) {
  if (!channel.settled()) return;
  const uint16_t id = channel.id_;
  forget(receiving_, id);
  freeIds_.push_back(id);
}

void ChannelTable::closeGroup(uint64_t group) {
  if (!closedGroups_.insert(group)) return;
  // The maps by key have the channels of a group side by side.
  constexpr auto kLeast = std::numeric_limits<Rank>::min(),
                 kMost = std::numeric_limits<Rank>::max();
  const ChannelKey first{group, 0, 0, kLeast, kLeast}, last{group, 255, 255, kMost, kMost};
  const auto ofGroup = [&](auto& channels) {
    return std::pair(channels.lower_bound(first), channels.upper_bound(last));
  };

  const auto [firstOpen, endOfOpens] = ofGroup(keptOpens_);
  for (auto it = firstOpen; it != endOfOpens; ++it) {
    const KeptOpen& kept = it->second;
    sendClose(kept.from, kept.message.header.channel, group, 0);
  }
  keptOpens_.erase(firstOpen, endOfOpens);

  const auto [firstSender, endOfSenders] = ofGroup(sendByKey_);
  for (auto it = firstSender; it != endOfSenders; ++it) {
    SendChannel* const channel = it->second;
    channel->closed_ = true;
    if (channel->isOpen()) {
      sendByRemoteId_.erase({channel->peer_, channel->remoteId_});
      sendClose(channel->peer_, channel->remoteId_, group, channel->sent_);
    }
    if (channel->flushed_ == channel->sent_) forget(sending_, channel->serial_);
  }
  sendByKey_.erase(firstSender, endOfSenders);

  std::erase_if(owing_, [group](ReceiveChannel* c) { return c->key_.group == group; });
  const auto [firstReceiver, endOfReceivers] = ofGroup(receiveByKey_);
  for (auto it = firstReceiver; it != endOfReceivers; ++it) {
    ReceiveChannel* const channel = it->second;
    channel->closed_ = true;
    channel->withdrawPosts();
    channel->memory_ = {};
    retireIfSettled(*channel);
  }
  receiveByKey_.erase(firstReceiver, endOfReceivers);
}

bool ChannelTable::drained(uint64_t group, PeerId peer) const {
  return !numChannels_.contains({group, peer});
}

}  // namespace smddp::transport
