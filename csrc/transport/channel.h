// One-way streams of numbered messages between two ranks, over put() and control().
//
// A channel belongs to the receiver: it owns `window` slots in registered memory and tells the
// sender where they lie (Open). Message n goes to slot (n-1) % window as soon as the receiver has
// consumed message n - window (Grant). Puts may complete in any order; the receiver's arrived()
// advances over the contiguous prefix.
//
//   slot:  | PutHeader, 64 bytes | payload, at most slotBytes | up to a multiple of 64 |
//
// Threads: everything here is used by the thread that owns the engine at that time; no locks.
// Nothing blocks and nothing waits: "not now" is a return value, deadlines are the caller's.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/types.h"
#include "transport/transport.h"
#include "transport/wire.h"

namespace smddp::transport {

class ChannelTable;

// Which channel it is; both ends name it alike.
struct ChannelKey {
  uint64_t group = 0;
  uint8_t track = 0;   // operations in flight at the same time use different tracks
  uint8_t stream = 0;  // tells apart the channels between the same two ranks in one plan
  Rank source = 0;
  Rank destination = 0;
  friend auto operator<=>(const ChannelKey&, const ChannelKey&) = default;
};
std::string toString(const ChannelKey& key);

// Bytes from one slot to the next. A receive channel needs window * slotStride(slotBytes) bytes.
constexpr int64_t slotStride(int64_t slotBytes) {
  return (slotBytes + static_cast<int64_t>(kHeaderBytes) + 63) / 64 * 64;
}

// The sending end. Owned by the table; a reference stays valid until closeGroup().
class SendChannel {
 public:
  const ChannelKey& key() const { return key_; }
  PeerId peer() const { return peer_; }
  // The receiver has told where its window lies.
  bool open() const { return window_ != 0; }
  uint64_t sent() const { return sent_; }
  // The payloads of the first flushed() puts may be overwritten.
  uint64_t flushed() const { return flushed_; }

  // Sends message `number`, which must be sent() + 1. The payload stays untouched until flushed()
  // >= number. False: not now (not open, no credit, or the transport is full); poll the table and
  // try again. Throws Mismatch for a payload longer than the receiver's slots.
  [[nodiscard]] bool put(uint64_t number, Payload payload, const CallFingerprint& call,
                         uint64_t operation);

 private:
  friend class ChannelTable;
  SendChannel(Transport& transport, const ChannelKey& key, PeerId peer, uint32_t serial)
      : transport_(transport), key_(key), peer_(peer), serial_(serial) {}
  void onOpen(const OpenMessage& message);
  void onPutDone(uint32_t lowBits);

  Transport& transport_;
  const ChannelKey key_;
  const PeerId peer_;
  const uint32_t serial_;  // upper half of our tokens; never reused, so a late token finds nobody
  uint16_t remoteId_ = 0;  // the receiver's channel id
  RemoteKey region_;
  uint64_t offset_ = 0;
  int64_t slotBytes_ = 0;
  uint64_t window_ = 0;  // 0: not open yet
  uint64_t sent_ = 0;
  uint64_t consumed_ = 0;  // by the receiver, as far as it told us
  uint64_t flushed_ = 0;
  std::vector<bool> done_;  // puts above flushed_ whose payload is free, by number % window
  bool closed_ = false;     // by closeGroup(); lives on while puts are in flight
};

// The receiving end. Owned by the table; a reference stays valid until closeGroup().
class ReceiveChannel {
 public:
  const ChannelKey& key() const { return key_; }
  PeerId peer() const { return peer_; }
  int64_t window() const { return static_cast<int64_t>(window_); }
  // Messages 1 … arrived() are complete in memory.
  uint64_t arrived() const { return arrived_; }
  uint64_t released() const { return released_; }

  // Of a message in (released(), arrived()]. Throws Transport when what lies in the slot is not
  // that message: another magic, group or number, or longer than a slot.
  const PutHeader& header(uint64_t number) const;
  std::span<const std::byte> payload(uint64_t number) const;

  // The first `count` messages are consumed; their slots will be overwritten. Counts never go back.
  // Grants are batched: one goes out when half the window is owed or when the sender may have none
  // left.
  void release(uint64_t count);

 private:
  friend class ChannelTable;
  ReceiveChannel(ChannelTable& table, const ChannelKey& key, PeerId peer, uint16_t id,
                 std::span<std::byte> memory, int64_t slotBytes, int64_t window);
  void onPut(uint32_t immediate);
  uint64_t owed() const { return released_ - granted_; }
  bool grantIsDue() const;
  bool settled() const { return closed_ && senderClosed_ && arrived_ >= sentBySender_; }

  ChannelTable& table_;
  const ChannelKey key_;
  const PeerId peer_;
  const uint16_t id_;  // in immediate values
  std::span<std::byte> memory_;
  const int64_t slotBytes_;
  const uint64_t window_;
  uint64_t arrived_ = 0;
  uint64_t highest_ = 0;  // greatest number that is here, with or without those before it
  uint64_t released_ = 0;
  uint64_t granted_ = 0;            // the part of released_ that the sender was told
  std::vector<bool> here_;          // messages above arrived_, by number % window
  std::vector<PutHeader> headers_;  // copied on arrival: check and use see the same bytes
  bool listed_ = false;             // in the table's list of channels that owe a grant
  bool hurried_ = false;            // by flushGrants(): do not batch what is owed
  bool closed_ = false;             // by closeGroup(): memory_ is no longer ours to read
  bool senderClosed_ = false;
  uint64_t sentBySender_ = 0;  // how many messages it sent in all, once senderClosed_
};

// What the table hands on: control messages that are not about channels, and failed peers.
class ControlSink {
 public:
  virtual ~ControlSink() = default;
  // `message` begins with a valid ControlHeader of kind Abort or of a kind >= kFirstEngineKind.
  virtual void onControl(PeerId from, Bytes message) = 0;
  // Said once per peer: the transport lost it, or it sent what we cannot understand.
  virtual void onPeerFailed(PeerId peer, const std::string& cause) = 0;
};

// All channels over one transport: it matches Opens with send(), immediate values with receive
// channels and tokens with send channels, and keeps what the transport had no room for.
//
// Ends: destroy it before the transport; puts that are then in flight are the transport's to
// cancel. Errors: of the transport pass through; of one peer go to the ControlSink.
class ChannelTable final : private Sink {
 public:
  ChannelTable(Transport& transport, ControlSink& above) : transport_(transport), above_(above) {}
  ChannelTable(const ChannelTable&) = delete;
  ChannelTable& operator=(const ChannelTable&) = delete;

  // The channel of this name, made by the first call. An Open that came before is applied.
  SendChannel& send(const ChannelKey& key, PeerId peer);
  // The channel of this name; the first call tells the sender where its slots lie. `memory` holds
  // window * slotStride(slotBytes) bytes, aligned to 64, `offset` bytes into what was registered as
  // `region`.
  ReceiveChannel& receive(const ChannelKey& key, PeerId peer, std::span<std::byte> memory,
                          RemoteKey region, uint64_t offset, int64_t slotBytes, int64_t window);

  // A control message of the engine's, in order behind everything said to this peer before. Never
  // refused: what the transport has no room for is kept and sent by poll(). Nothing is sent to a
  // peer that failed.
  void control(PeerId peer, Bytes message);

  // Progress: sends what waits, polls the transport, grants what is due. Returns how many events
  // there were.
  size_t poll();
  // Tells senders about everything that was released, batched or not. For the end of an operation.
  void flushGrants();
  // Something waits for room in the transport: do not sleep, poll() again.
  bool hasBacklog() const { return backlog_ != 0 || grantsDue_; }

  // Forgets the channels of a group; references to them end. An id of ours is used again only after
  // the sender closed its end too and all it sent has arrived. A group's number is used once in the
  // life of the table.
  void closeGroup(uint64_t group);
  // After closeGroup(): no put of this group reads or writes our memory any more. May stay false
  // for ever when a peer failed.
  bool drained(uint64_t group) const;

 private:
  friend class ReceiveChannel;
  struct KeptOpen {
    PeerId from = 0;
    OpenMessage message;
  };

  void onControl(PeerId from, Bytes message) override;
  void onPut(uint32_t immediate) override;
  void onPutDone(uint64_t token) override;
  void onPeerFailed(PeerId peer, const std::string& cause) override;

  void onOpen(PeerId from, const OpenMessage& message);
  void onGrant(PeerId from, const GrantMessage& message);
  void onClose(PeerId from, const CloseMessage& message);
  void sendClose(PeerId peer, uint16_t remoteId, uint64_t group, uint64_t sent);
  void bind(SendChannel& channel, PeerId from, const OpenMessage& message);

  uint16_t newId();
  void retireIfSettled(ReceiveChannel& channel);
  void noteOwed(ReceiveChannel& channel);
  bool sendGrant(ReceiveChannel& channel);
  void sendDueGrants();
  void sendBacklog();
  // Takes a peer that broke the protocol for lost, once.
  void fail(PeerId peer, const std::string& cause);

  Transport& transport_;
  ControlSink& above_;

  // Channels live in the tables by number; the maps by name hold those that were not closed.
  std::unordered_map<uint32_t, std::unique_ptr<SendChannel>> sending_;       // by serial
  std::unordered_map<uint16_t, std::unique_ptr<ReceiveChannel>> receiving_;  // by id
  std::map<ChannelKey, SendChannel*> sendByKey_;
  std::map<ChannelKey, ReceiveChannel*> receiveByKey_;
  std::map<std::pair<PeerId, uint16_t>, SendChannel*> sendByRemoteId_;
  std::map<ChannelKey, KeptOpen> keptOpens_;
  std::set<uint64_t> closedGroups_;  // an Open that comes later is answered by Close
  uint32_t lastSerial_ = 0;
  uint32_t freshIds_ = 0;         // ids handed out for the first time so far
  std::deque<uint16_t> freeIds_;  // oldest first

  std::vector<ReceiveChannel*> owing_;  // released_ > granted_
  bool grantsDue_ = false;              // of some of these it must be told at the next chance
  std::map<PeerId, std::deque<std::vector<std::byte>>> outbox_;
  size_t backlog_ = 0;  // messages in outbox_
  std::set<PeerId> failed_;
};

}  // namespace smddp::transport
