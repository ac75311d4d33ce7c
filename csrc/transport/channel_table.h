// The table of all channels over one transport.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/recent_set.h"
#include "transport/channel.h"
#include "transport/transport.h"
#include "transport/wire.h"

namespace smddp::transport {

// Receives what is not for a channel: the engine's control messages, and failed peers.
class ControlSink {
 public:
  virtual ~ControlSink() = default;
  // `message` begins with a valid ControlHeader of kind Abort or of a kind >= kFirstEngineKind.
  virtual void onControl(PeerId from, Bytes message) = 0;
  // Called once per peer: the transport lost it, or it sent a message that breaks the protocol.
  virtual void onPeerFailed(PeerId peer, const std::string& cause) = 0;
};

// Owns all channels over one transport. It matches Opens with send(), immediate values with receive channels and tokens
// with send channels, and keeps messages that the transport had no room for.
//
// Threads: those of channel.h. Ends: destroy it before the transport, which cancels the puts in flight. Errors: an
// exception of the transport passes through; a failure of one peer goes to the ControlSink.
class ChannelTable final : private Sink {
 public:
  ChannelTable(Transport& transport, ControlSink& above) : transport_(transport), above_(above) {}
  ChannelTable(const ChannelTable&) = delete;
  ChannelTable& operator=(const ChannelTable&) = delete;

  // Returns the channel with this key; the first call makes it, and applies an Open that came before.
  SendChannel& send(const ChannelKey& key, PeerId peer);
  // Returns the channel with this key; the first call makes it, and tells the sender where its slots lie. `memory` has
  // window * slotStride(slotBytes) bytes, is aligned to 64, and is registered as `target`.
  ReceiveChannel& receive(const ChannelKey& key, PeerId peer, std::span<std::byte> memory,
                          RemoteKey target, int64_t slotBytes, int64_t window);

  // Sends a control message of the engine, in order after all earlier ones to this peer. If the transport has no room,
  // the message is kept and poll() sends it. Nothing is sent to a peer that failed.
  void control(PeerId peer, Bytes message);

  // Makes progress: sends kept messages, polls the transport, sends grants that are due. Returns the number of events.
  size_t poll();
  // Sends grants for all released messages, without batching. For the end of an operation.
  void sendGrantsNow();
  // Whether the peer's host has all that was sent to it.
  bool isDelivered(PeerId peer) const {
    return !outbox_.contains(peer) && transport_.isDelivered(peer);
  }
  // True if messages wait for room in the transport: do not sleep, poll() again.
  bool hasBacklog() const { return backlog_ != 0 || grantsDue_; }

  // Removes the channels of a group; references to them become invalid. An id of ours is used again only after the
  // sender has closed its end, too, and all its messages have arrived. The number of a group is never used again.
  void closeGroup(uint64_t group);
  // After closeGroup(): true if no put of this group to or from the peer reads or writes our memory any more. It may
  // stay false for ever if the peer failed.
  bool drained(uint64_t group, PeerId peer) const;

 private:
  friend class ReceiveChannel;
  struct KeptOpen {
    PeerId from = 0;
    OpenMessage message;
  };

  void onControl(PeerId from, Bytes message) override;
  void onPut(uint32_t immediate) override;
  std::span<std::byte> placeFor(PeerId from, uint32_t immediate, size_t payloadBytes) override;
  void onPutDone(uint64_t token) override;
  void onPeerFailed(PeerId peer, const std::string& cause) override;

  void onOpen(PeerId from, const OpenMessage& message);
  void onGrant(PeerId from, const GrantMessage& message);
  void onClose(PeerId from, const CloseMessage& message);
  void sendClose(PeerId peer, uint16_t remoteId, uint64_t group, uint64_t sent);
  void bind(SendChannel& channel, PeerId from, const OpenMessage& message);

  uint16_t newId();
  template <typename Channels, typename Number>
  void forget(Channels& channels, Number number);
  void retireIfSettled(ReceiveChannel& channel);
  void noteOwed(ReceiveChannel& channel);
  bool sendGrant(ReceiveChannel& channel);
  void sendDueGrants();
  void sendBacklog();
  // Marks a peer as failed and reports it, once.
  void fail(PeerId peer, const std::string& cause);

  Transport& transport_;
  ControlSink& above_;

  // The maps by number own the channels; the maps by key have those that are not closed.
  std::unordered_map<uint32_t, std::unique_ptr<SendChannel>> sending_;       // by serial
  std::unordered_map<uint16_t, std::unique_ptr<ReceiveChannel>> receiving_;  // by id
  std::map<ChannelKey, SendChannel*> sendByKey_;
  std::map<ChannelKey, ReceiveChannel*> receiveByKey_;
  std::map<std::pair<PeerId, uint16_t>, SendChannel*> sendByRemoteId_;
  std::map<ChannelKey, KeptOpen> keptOpens_;
  // A later Open is answered with Close. Control messages arrive in order, so none is under way for as long as it takes
  // to close this many groups.
  RecentSet closedGroups_{4096};
  // How many channels sending_ and receiving_ have, by group and peer.
  std::map<std::pair<uint64_t, PeerId>, size_t> numChannels_;
  uint32_t lastSerial_ = 0;
  uint32_t freshIds_ = 0;         // ids below this have been used before
  std::deque<uint16_t> freeIds_;  // oldest first

  std::vector<ReceiveChannel*> owing_;  // released_ > granted_
  bool grantsDue_ = false;              // some of these must send their grant in the next poll()
  std::map<PeerId, std::deque<std::vector<std::byte>>> outbox_;
  size_t backlog_ = 0;  // messages in outbox_
  std::set<PeerId> failed_;
};

}  // namespace smddp::transport
