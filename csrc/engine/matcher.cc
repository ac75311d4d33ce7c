#include "engine/matcher.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "common/error.h"
#include "engine/call.h"
#include "engine/control_kind.h"

namespace smddp::engine {
namespace {

using transport::Bytes;
using transport::ControlHeader;

// A peer that announces more messages that nobody receives is broken.
constexpr size_t kMaxAnnounced = 1 << 16;

// Announce, Accept and Buffered; a Buffered has its data behind it. Accept uses header, group and id only.
//
//   byte  0               8               16              24      28         32      40
//         | header        | group         | id            | tag   | reserved | bytes |
struct MatcherMessage {
  ControlHeader header;
  uint64_t group = 0;
  uint64_t id = 0;
  int32_t tag = 0;
  uint32_t reserved = 0;
  int64_t bytes = 0;
};
static_assert(sizeof(MatcherMessage) + Matcher::kShortBytes <= transport::kMaxControlBytes);
static_assert(sizeof(MatcherMessage) == 40 && std::is_trivially_copyable_v<MatcherMessage>);

MatcherMessage announcementOf(const Exchange& send, uint64_t group, uint8_t kind) {
  MatcherMessage announcement;
  announcement.header.kind = kind;
  announcement.group = group;
  announcement.id = send.id;
  announcement.tag = send.message.tag;
  announcement.bytes = send.bytes;
  return announcement;
}

void copy(const Buffer& from, const Buffer& to, int64_t bytes) {
  for (int64_t moved = 0; moved < bytes;) {
    const auto source = from.at(moved, bytes - moved);
    const auto target = to.at(moved, source.bytes);
    std::memmove(target.data, source.data, static_cast<size_t>(target.bytes));
    moved += target.bytes;
  }
}

}  // namespace

void Matcher::submit(Exchange exchange) {
  ownership_.assertOwned();
  exchange.bytes = totalBytes(exchange.message.buffer);
  if (!exchange.message.send) {
    post(std::move(exchange));
    return;
  }
  if (exchange.message.peer == me_) {
    sendToSelf(std::move(exchange));
    return;
  }
  exchange.id = nextId_++;
  if (exchange.message.buffered && exchange.bytes <= kShortBytes) {
    sendBuffered(std::move(exchange));
    return;
  }
  const MatcherMessage announcement = announcementOf(exchange, group_, kAnnounce);
  const Rank peer = exchange.message.peer;
  offered_[peer].emplace(exchange.id, std::move(exchange));
  host_.sendControl(peer, transport::bytesOf(announcement));
}

void Matcher::sendBuffered(Exchange send) {
  const MatcherMessage head = announcementOf(send, group_, kBuffered);
  std::array<std::byte, sizeof head + kShortBytes> message;
  std::memcpy(message.data(), &head, sizeof head);
  copy(Buffer(send.message.buffer), Buffer(message.data() + sizeof head), send.bytes);
  const Rank peer = send.message.peer;
  host_.sendControl(peer, {message.data(), sizeof head + static_cast<size_t>(send.bytes)});
  // A message that waits for room leaves when somebody polls. The engine polls for a group that is not idle, so the
  // send has not ended until then.
  if (host_.backlogged(peer)) {
    leaving_.push_back(std::move(send));
  } else {
    host_.finish(send);
  }
}

bool Matcher::withdraw(const Completion& receive) {
  ownership_.assertOwned();
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const Exchange& exchange) {
    return exchange.completion.get() == &receive;
  });
  if (found == posted_.end()) return false;
  posted_.erase(found);
  return true;
}

void Matcher::post(Exchange exchange) {
  const Rank wanted = exchange.message.peer;
  const auto self = std::find_if(toSelf_.begin(), toSelf_.end(), [&](const Exchange& send) {
    return (wanted == me_ || wanted == kAnySource) && send.message.tag == exchange.message.tag;
  });
  if (self != toSelf_.end()) {
    Exchange send = std::move(*self);
    toSelf_.erase(self);
    copyToSelf(send, exchange);
    return;
  }
  for (auto& [from, messages] : announced_) {
    if (wanted != kAnySource && wanted != from) continue;
    const auto found = std::find_if(messages.begin(), messages.end(), [&](const Announced& m) {
      return m.tag == exchange.message.tag;
    });
    if (found == messages.end()) continue;
    Announced message = std::move(*found);
    messages.erase(found);
    accept(from, std::move(message), std::move(exchange));
    return;
  }
  posted_.push_back(std::move(exchange));
}

bool Matcher::onControl(Rank from, Bytes message) {
  ownership_.assertOwned();
  MatcherMessage head;
  if (message.size() < sizeof head) return false;
  std::memcpy(&head, message.data(), sizeof head);
  const Bytes data = message.subspan(sizeof head);
  if (head.header.kind == kBuffered) {
    if (head.bytes < 0 || static_cast<uint64_t>(head.bytes) != data.size()) return false;
    announced(from, {head.id, head.tag, head.bytes, {data.begin(), data.end()}, true});
    return true;
  }
  if (!data.empty()) return false;
  if (head.header.kind == kAccept) {
    accepted(from, head.id);
    return true;
  }
  if (head.header.kind != kAnnounce || head.bytes < 0) return false;
  announced(from, {head.id, head.tag, head.bytes});
  return true;
}

void Matcher::announced(Rank from, Announced message) {
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const Exchange& receive) {
    return (receive.message.peer == from || receive.message.peer == kAnySource) &&
           receive.message.tag == message.tag;
  });
  if (found != posted_.end()) {
    Exchange receive = std::move(*found);
    posted_.erase(found);
    accept(from, std::move(message), std::move(receive));
    return;
  }
  auto& waiting = announced_[from];
  if (waiting.size() >= kMaxAnnounced) {
    raise(ErrorKind::Transport, "rank {} has {} messages that nobody receives", from,
          waiting.size());
  }
  waiting.push_back(std::move(message));
}

void Matcher::accept(Rank from, Announced message, Exchange exchange) {
  if (message.bytes != exchange.bytes) {
    const int64_t expected = exchange.bytes;
    // The error ends it, like all exchanges of the group.
    posted_.push_back(std::move(exchange));
    raise(ErrorKind::Mismatch,
          "rank {} sends {} bytes {} to rank {}, which receives {}: {} must have the same size",
          from, message.bytes, describeTag(message.tag), me_, expected,
          message.tag < 0 ? "what one rank splits off for another, and the other expects from it,"
                          : "the tensors on both sides");
  }
  if (message.buffered) {
    copy(Buffer(message.data.data()), Buffer(exchange.message.buffer), message.bytes);
    exchange.completion->setSource(from);
    host_.finish(exchange);
    return;
  }
  MatcherMessage answer;
  answer.header.kind = kAccept;
  answer.group = group_;
  answer.id = message.id;
  exchange.completion->setSource(from);
  receiving_[from].push_back(std::move(exchange));
  host_.sendControl(from, transport::bytesOf(answer));
}

void Matcher::accepted(Rank from, uint64_t id) {
  auto& offers = offered_[from];
  const auto found = offers.find(id);
  if (found == offers.end()) {
    raise(ErrorKind::Transport, "rank {} accepts a message that was never offered", from);
  }
  sending_[from].push_back(std::move(found->second));
  offers.erase(found);
}

void Matcher::sendToSelf(Exchange send) {
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const Exchange& receive) {
    return (receive.message.peer == me_ || receive.message.peer == kAnySource) &&
           receive.message.tag == send.message.tag;
  });
  if (found == posted_.end()) {
    toSelf_.push_back(std::move(send));
    return;
  }
  Exchange receive = std::move(*found);
  posted_.erase(found);
  copyToSelf(send, receive);
}

void Matcher::copyToSelf(Exchange& send, Exchange& receive) {
  if (send.bytes != receive.bytes) {
    toSelf_.push_back(std::move(send));
    posted_.push_back(std::move(receive));
    raise(ErrorKind::Mismatch, "rank {} sends itself {} bytes {} and receives {}", me_,
          toSelf_.back().bytes, describeTag(toSelf_.back().message.tag), posted_.back().bytes);
  }
  copy(Buffer(send.message.buffer), Buffer(receive.message.buffer), send.bytes);
  receive.completion->setSource(me_);
  host_.finish(send);
  host_.finish(receive);
}

bool Matcher::advance() {
  ownership_.assertOwned();
  bool advanced = false;
  for (auto& [peer, queue] : sending_) {
    if (!queue.empty()) advanced |= pumpSend(peer, queue);
  }
  for (auto& [peer, queue] : receiving_) {
    if (!queue.empty()) advanced |= pumpReceive(peer, queue);
  }
  while (!leaving_.empty() && !host_.backlogged(leaving_.front().message.peer)) {
    Exchange gone = std::move(leaving_.front());
    leaving_.pop_front();
    host_.finish(gone);
    advanced = true;
  }
  return advanced;
}

bool Matcher::pumpSend(Rank peer, Queue& queue) {
  transport::SendChannel& channel = host_.sendChannel(peer);
  bool advanced = false;
  for (Exchange& exchange : queue) {
    const Buffer buffer(exchange.message.buffer);
    while (exchange.moved < exchange.bytes) {
      const int64_t wanted = std::min(messageBytes_, exchange.bytes - exchange.moved);
      const transport::Payload payload = buffer.payload(exchange.moved, wanted);
      if (!channel.put(channel.sent() + 1, payload, {})) break;
      exchange.moved += static_cast<int64_t>(payload.size());
      exchange.lastPut = channel.sent();
      advanced = true;
    }
    if (exchange.moved < exchange.bytes) break;
  }
  while (!queue.empty() && queue.front().moved == queue.front().bytes &&
         channel.flushed() >= queue.front().lastPut) {
    Exchange exchange = std::move(queue.front());
    queue.pop_front();
    host_.finish(exchange);
    advanced = true;
  }
  return advanced;
}

bool Matcher::pumpReceive(Rank peer, Queue& queue) {
  transport::ReceiveChannel& channel = host_.receiveChannel(peer);
  bool advanced = false;
  while (!queue.empty()) {
    Exchange& exchange = queue.front();
    const Buffer buffer(exchange.message.buffer);
    while (exchange.moved < exchange.bytes && channel.arrived() > channel.released()) {
      const uint64_t number = channel.released() + 1;
      const auto payload = channel.payload(number);
      const auto length = static_cast<int64_t>(payload.size());
      if (length > exchange.bytes - exchange.moved) {
        raise(ErrorKind::Transport, "rank {} sent more bytes than it had announced", peer);
      }
      for (int64_t copied = 0; copied < length;) {
        const auto run = buffer.at(exchange.moved + copied, length - copied);
        std::memcpy(run.data, payload.data() + copied, static_cast<size_t>(run.bytes));
        copied += run.bytes;
      }
      exchange.moved += length;
      channel.release(number);
      advanced = true;
    }
    if (exchange.moved < exchange.bytes) return advanced;
    Exchange finished = std::move(exchange);
    queue.pop_front();
    host_.finish(finished);
    advanced = true;
  }
  return advanced;
}

bool Matcher::idle() const {
  ownership_.assertOwned();
  const auto empty = [](const auto& queues) {
    return std::all_of(queues.begin(), queues.end(),
                       [](const auto& entry) { return entry.second.empty(); });
  };
  return posted_.empty() && toSelf_.empty() && leaving_.empty() && empty(offered_) &&
         empty(sending_) && empty(receiving_);
}

void Matcher::forEach(const std::function<void(Exchange&)>& visit) {
  ownership_.assertOwned();
  for (Exchange& exchange : posted_) visit(exchange);
  for (Exchange& exchange : toSelf_) visit(exchange);
  for (Exchange& exchange : leaving_) visit(exchange);
  for (auto& [peer, offers] : offered_) {
    for (auto& [id, exchange] : offers) visit(exchange);
  }
  for (auto* queues : {&sending_, &receiving_}) {
    for (auto& [peer, queue] : *queues) {
      for (Exchange& exchange : queue) visit(exchange);
    }
  }
}

void Matcher::clear() {
  ownership_.assertOwned();
  posted_.clear();
  toSelf_.clear();
  leaving_.clear();
  announced_.clear();
  offered_.clear();
  sending_.clear();
  receiving_.clear();
}

}  // namespace smddp::engine
