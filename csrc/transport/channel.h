// Channels: one-way sequences of numbered messages between two ranks, over put() and control().
//
// The receiver owns `window` slots in registered memory and tells the sender where they lie (Open). Message n goes
// to slot (n-1) % window when the receiver has released message n - window (Grant). With a window of 4, messages 1 to
// 4 go to slots 0 to 3; message 5 goes to slot 0 when message 1 has been released. Puts may complete in any order; the
// receiver's arrived() advances over the contiguous prefix.
//
//   slot:  | PutHeader, 64 bytes | payload, at most slotBytes | padding to a multiple of 64 |
//
// Threads: only the thread that owns the engine uses channels; they have no locks. Nothing blocks or waits: a call
// returns "not now" instead. Deadlines are the caller's.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "common/types.h"
#include "transport/transport.h"
#include "transport/wire.h"

namespace smddp::transport {

class ChannelTable;

// Identifies a channel. Both ends use the same key.
struct ChannelKey {
  uint64_t group = 0;
  uint8_t track = 0;  // operations in flight at the same time use different tracks
  // Tells apart the channels between the same two ranks on a track: the plan's stream, + plan::kNumStreams for short
  // slots.
  uint8_t subchannel = 0;
  Rank source = 0;
  Rank destination = 0;
  // clang-tidy 14 takes the default for a comparison with 0.
  friend auto operator<=>(const ChannelKey&,
                          const ChannelKey&) = default;  // NOLINT(modernize-use-nullptr)
};
std::string toString(const ChannelKey& key);

// The bytes from one slot to the next. A receive channel needs window * slotStride(slotBytes) bytes.
constexpr int64_t slotStride(int64_t slotBytes) {
  return (slotBytes + static_cast<int64_t>(kHeaderBytes) + 63) / 64 * 64;
}

// The sending end of a channel. The table owns it; a reference stays valid until closeGroup().
class SendChannel {
 public:
  const ChannelKey& key() const { return key_; }
  PeerId peer() const { return peer_; }
  // True when the receiver has told where its window lies.
  bool isOpen() const { return window_ != 0; }
  // Whether the receiver has room for one more message. A grant can come before the completions of its puts. The second
  // bound makes sure that done_ has room for them.
  bool hasCredit() const { return sent_ - released_ < window_ && sent_ - flushed_ < window_; }
  // The longest payload that the receiver takes; valid if isOpen().
  int64_t slotBytes() const { return slotBytes_; }
  uint64_t sent() const { return sent_; }
  // The payloads of the first flushed() puts may be overwritten.
  uint64_t flushed() const { return flushed_; }

  // Sends message `number`, which must be sent() + 1. The caller keeps the payload untouched until flushed() >= number.
  // False: not now, because the channel is not open, has no credit, or the transport is full; poll the table and try
  // again. Throws Mismatch for a payload longer than the receiver's slots.
  [[nodiscard]] bool put(uint64_t number, Payload payload, const CallFingerprint& call);

 private:
  friend class ChannelTable;
  SendChannel(Transport& transport, const ChannelKey& key, PeerId peer, uint32_t serial)
      : transport_(transport), key_(key), peer_(peer), serial_(serial) {}
  void onOpen(const OpenMessage& message);
  void onPutDone(uint32_t lowBits);

  Transport& transport_;
  const ChannelKey key_;
  const PeerId peer_;
  const uint32_t
      serial_;  // upper half of our tokens; never reused, so that a late token finds no other channel
  uint16_t remoteId_ = 0;  // the receiver's channel id
  RemoteKey target_;
  int64_t slotBytes_ = 0;
  uint64_t window_ = 0;  // 0: not open yet
  uint64_t sent_ = 0;
  uint64_t released_ = 0;  // the messages that the receiver released, by its last grant
  uint64_t flushed_ = 0;
  std::vector<bool> done_;  // puts above flushed_ whose payload is free, by number % window
  bool closed_ = false;     // by closeGroup(); the object stays while puts are in flight
};

// The receiving end of a channel. The table owns it; a reference stays valid until closeGroup().
class ReceiveChannel {
 public:
  const ChannelKey& key() const { return key_; }
  PeerId peer() const { return peer_; }
  int64_t window() const { return static_cast<int64_t>(window_); }
  int64_t slotBytes() const { return slotBytes_; }
  // Messages 1 … arrived() are complete in memory.
  uint64_t arrived() const { return arrived_; }
  uint64_t released() const { return released_; }

  // The header of a message in (released(), arrived()]. Throws Transport if the slot holds another message: if the
  // magic, group or number is wrong, or the length exceeds the slot.
  const PutHeader& header(uint64_t number) const;
  // In its slot, or where it was posted.
  std::span<const std::byte> payload(uint64_t number) const;

  // Allows the payload of a message to arrive in this memory, if it has that length, until release() or
  // withdrawPosts(). Numbers increase from call to call. Only a transport that takes in the bytes itself asks for the
  // memory (Sink::placeFor): TCP sockets, and the simulator. In shared memory and with libfabric the sender, or the
  // card, writes to the slot, so there this has no effect, as for a message that is under way already. Plans are the
  // same for all transports.
  void post(uint64_t number, std::span<std::byte> memory);
  // Nothing is written to posted memory any more.
  void withdrawPosts();

  // Gives the slots of the first `count` messages back to the sender. A lower count than before has no effect. Grants
  // are batched: one is sent when half of the window is owed, or when the sender may have used all its credit.
  void release(uint64_t count);

 private:
  friend class ChannelTable;
  ReceiveChannel(ChannelTable& table, const ChannelKey& key, PeerId peer, uint16_t id,
                 std::span<std::byte> memory, int64_t slotBytes, int64_t window);
  void onPut(uint32_t immediate);
  std::span<std::byte> placeFor(uint32_t immediate, size_t payloadBytes);
  uint64_t owed() const { return released_ - granted_; }
  bool grantIsDue() const;
  bool settled() const { return closed_ && senderClosed_ && arrived_ >= sentBySender_; }

  ChannelTable& table_;
  const ChannelKey key_;
  const PeerId peer_;
  const uint16_t id_;  // the channel id in immediate values
  std::span<std::byte> memory_;
  const int64_t slotBytes_;
  const uint64_t window_;
  uint64_t arrived_ = 0;
  uint64_t highest_ = 0;  // the greatest number that has arrived, with or without those before it
  uint64_t released_ = 0;
  uint64_t granted_ = 0;            // the value of released_ in the last grant
  std::vector<bool> early_;         // messages above arrived_ that have arrived, by number % window
  std::vector<PutHeader> headers_;  // copied on arrival, so that check and use see the same bytes
  struct Posted {
    uint64_t number;
    std::span<std::byte> memory;
  };
  std::deque<Posted> posted_;  // by number; an arrival removes those up to arrived_
  // Where messages above released_ lie that arrived, or are arriving, in posted memory; by number % window.
  std::vector<std::span<std::byte>> placed_;
  bool listed_ = false;     // the channel is in the table's owing_
  bool unbatched_ = false;  // by sendGrantsNow(): send the next grant at once
  bool closed_ = false;     // by closeGroup(): we may not read memory_ any more
  bool senderClosed_ = false;
  uint64_t sentBySender_ = 0;  // the number of messages sent in all; valid if senderClosed_
};

}  // namespace smddp::transport
