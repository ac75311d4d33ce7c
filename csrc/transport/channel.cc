#include "transport/channel.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"
#include "common/log.h"
#include "transport/channel_table.h"

namespace smddp::transport {
std::string toString(const ChannelKey& key) {
  return fmt::format("group {:x} track {} subchannel {} rank {} -> {}", key.group, key.track,
                     key.subchannel, key.source, key.destination);
}

bool SendChannel::put(uint64_t number, Payload payload, const CallFingerprint& call) {
  SMDDP_CHECK(number == sent_ + 1, "{}: message {} after {}", toString(key_), number, sent_);
  if (!isOpen()) return false;
  if (payload.size() > static_cast<uint64_t>(slotBytes_)) {
    raise(ErrorKind::Mismatch,
          "{}: a message of {} bytes, but rank {} has slots of {} bytes. SMDDP_FABRIC_CHUNK_BYTES "
          "must be the same on all ranks.",
          toString(key_), payload.size(), key_.destination, slotBytes_);
  }
  if (!hasCredit()) return false;

  PutHeader header;
  header.length = static_cast<uint32_t>(payload.size());
  header.group = key_.group;
  header.number = number;
  header.call = call;
  const uint64_t slot = (number - 1) % window_;
  const RemoteSlot where{target_, slot * static_cast<uint64_t>(slotStride(slotBytes_))};
  const uint64_t token = uint64_t{serial_} << 32 | static_cast<uint32_t>(number);
  if (!transport_.put(peer_, where, makeImmediate(remoteId_, number), bytesOf(header), payload,
                      token)) {
    return false;
  }
  sent_ = number;
  return true;
}

void SendChannel::onOpen(const OpenMessage& message) {
  remoteId_ = message.header.channel;
  target_ = message.target;
  slotBytes_ = static_cast<int64_t>(message.slotBytes);
  window_ = message.window;
  done_.assign(window_, false);
}

void SendChannel::onPutDone(uint32_t lowBits) {
  // Restores the upper bits: flushed_ = 2^32 − 1 and lowBits = 2 give 2^32 + 2.
  const uint64_t number = flushed_ + (lowBits - static_cast<uint32_t>(flushed_));
  if (number <= flushed_ || number > sent_ || done_[number % window_]) {
    SMDDP_LOG(Debug, "transport", "{}: second completion of put {} ignored", toString(key_),
              number);
    return;
  }
  done_[number % window_] = true;
  // Clear the bits of the prefix; message number + window uses the same bit.
  while (flushed_ < sent_ && done_[(flushed_ + 1) % window_]) done_[++flushed_ % window_] = false;
}

ReceiveChannel::ReceiveChannel(ChannelTable& table, const ChannelKey& key, PeerId peer, uint16_t id,
                               std::span<std::byte> memory, int64_t slotBytes, int64_t window)
    : table_(table),
      key_(key),
      peer_(peer),
      id_(id),
      memory_(memory),
      slotBytes_(slotBytes),
      window_(static_cast<uint64_t>(window)),
      early_(window_, false),
      headers_(window_),
      placed_(window_) {}

const PutHeader& ReceiveChannel::header(uint64_t number) const {
  SMDDP_CHECK(number > released_ && number <= arrived_, "{}: message {} is not in ({}, {}]",
              toString(key_), number, released_, arrived_);
  const PutHeader& header = headers_[number % window_];
  const std::span<std::byte> placed = placed_[number % window_];
  if (header.magic != kPutMagic || header.group != key_.group || header.number != number ||
      header.length > static_cast<uint64_t>(slotBytes_) ||
      (!placed.empty() && header.length != placed.size())) {
    raise(ErrorKind::Transport,
          "{}: the slot of message {} holds another one (magic {:08x}, group {:x}, number {}, {} "
          "bytes "
          "for slots of {}). The network or a different smddp version on rank {} damaged it.",
          toString(key_), number, header.magic, header.group, header.number, header.length,
          slotBytes_, key_.source);
  }
  return header;
}

std::span<const std::byte> ReceiveChannel::payload(uint64_t number) const {
  const PutHeader& valid = header(number);
  if (const auto placed = placed_[number % window_]; !placed.empty()) return placed;
  const uint64_t slot = (number - 1) % window_ * static_cast<uint64_t>(slotStride(slotBytes_));
  return memory_.subspan(slot + kHeaderBytes, valid.length);
}

void ReceiveChannel::release(uint64_t count) {
  SMDDP_CHECK(count <= arrived_, "{}: {} messages released, {} arrived", toString(key_), count,
              arrived_);
  if (count <= released_) return;
  while (released_ < count) placed_[++released_ % window_] = {};
  table_.noteOwed(*this);
}

void ReceiveChannel::post(uint64_t number, std::span<std::byte> memory) {
  SMDDP_CHECK(posted_.empty() || posted_.back().number < number, "{}: message {} posted after {}",
              toString(key_), number, posted_.back().number);
  posted_.push_back({number, memory});
}

void ReceiveChannel::withdrawPosts() {
  posted_.clear();
  for (std::span<std::byte>& placed : placed_) {
    if (!placed.empty()) table_.transport_.withdraw(placed);
    placed = {};
  }
}

std::span<std::byte> ReceiveChannel::placeFor(uint32_t immediate, size_t payloadBytes) {
  const uint64_t number = numberOf(immediate, arrived_);
  // onPut() ignores such a message.
  if (number <= arrived_ || number > granted_ + window_ || early_[number % window_]) return {};
  const auto found = std::ranges::lower_bound(posted_, number, {}, &Posted::number);
  const bool isPosted =
      found != posted_.end() && found->number == number && found->memory.size() == payloadBytes;
  if (!isPosted || !placed_[number % window_].empty()) return {};
  return placed_[number % window_] = found->memory;
}

bool ReceiveChannel::grantIsDue() const {
  if (owed() == 0) return false;
  // If the sender has used all its credit (the last condition), it cannot go on before the grant.
  return unbatched_ || 2 * owed() >= window_ || highest_ == granted_ + window_;
}

void ReceiveChannel::onPut(uint32_t immediate) {
  const uint64_t number = numberOf(immediate, arrived_);
  // The sender may send at most `window` messages beyond those that were granted.
  if (number <= arrived_ || number > granted_ + window_ || early_[number % window_]) {
    SMDDP_LOG(Debug, "transport", "{}: message {} ignored, it is here or beyond the window",
              toString(key_), number);
    return;
  }
  early_[number % window_] = true;
  highest_ = std::max(highest_, number);
  if (!closed_) {
    const uint64_t slot = (number - 1) % window_ * static_cast<uint64_t>(slotStride(slotBytes_));
    std::memcpy(&headers_[number % window_], memory_.data() + slot, sizeof(PutHeader));
  }
  while (early_[(arrived_ + 1) % window_]) early_[++arrived_ % window_] = false;
  while (!posted_.empty() && posted_.front().number <= arrived_) posted_.pop_front();
}

}  // namespace smddp::transport
