#include "engine/operations/matcher.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "common/error.h"
#include "engine/calls/call.h"
#include "engine/calls/control_kind.h"

namespace smddp::engine::operations {
namespace {

using transport::Bytes;
using transport::ControlHeader;

// The memory for messages of one rank that this one has not asked for: some million announcements.
constexpr size_t kMaxAnnouncedBytes = size_t{64} << 20;

// Announce, Accept and Buffered; a Buffered has its data behind it. Accept uses header, group and id only.
//
//   byte  0               8               16              24      28         32      40
//         | header        | group         | id            | tag   | oneRun   | bytes |
struct MatcherMessage {
  ControlHeader header;
  uint64_t group = 0;
  uint64_t id = 0;
  int32_t tag = 0;
  uint32_t oneRun = 0;  // 1: all data messages but the last fill their slot (Announced)
  int64_t bytes = 0;
};
static_assert(sizeof(MatcherMessage) + Matcher::kMaxBuffered <= transport::kMaxControlBytes);
static_assert(sizeof(MatcherMessage) == 40 && std::is_trivially_copyable_v<MatcherMessage>);

MatcherMessage announcementOf(const Transfer& send, uint64_t group, uint8_t kind) {
  MatcherMessage announcement;
  announcement.header.kind = kind;
  announcement.group = group;
  announcement.id = send.id;
  announcement.tag = send.message.tag;
  announcement.oneRun = send.message.buffer.size() == 1 ? 1 : 0;
  announcement.bytes = send.bytes;
  return announcement;
}

void copy(const calls::Buffer& from, const calls::Buffer& to, int64_t bytes) {
  for (int64_t moved = 0; moved < bytes;) {
    const auto source = from.at(moved, bytes - moved);
    const auto target = to.at(moved, source.bytes);
    std::memmove(target.data, source.data, static_cast<size_t>(target.bytes));
    moved += target.bytes;
  }
}

}  // namespace

void Matcher::submit(Transfer transfer) {
  ownership_.assertOwned();
  transfer.bytes = calls::totalBytes(transfer.message.buffer);
  if (!transfer.message.send) {
    post(std::move(transfer));
    return;
  }
  if (transfer.message.peer == me_) {
    sendToSelf(std::move(transfer));
    return;
  }
  transfer.id = nextId_++;
  if (transfer.message.buffered && transfer.bytes <= kMaxBuffered) {
    sendBuffered(std::move(transfer));
    return;
  }
  const MatcherMessage announcement = announcementOf(transfer, group_, calls::kAnnounce);
  const Rank to = transfer.message.peer;
  awaitingAccept_[to].emplace(transfer.id, std::move(transfer));
  host_.sendControl(to, transport::bytesOf(announcement));
}

void Matcher::sendBuffered(Transfer send) {
  const MatcherMessage head = announcementOf(send, group_, calls::kBuffered);
  std::array<std::byte, sizeof head + kMaxBuffered> message;
  std::memcpy(message.data(), &head, sizeof head);
  copy(calls::Buffer(send.message.buffer), calls::Buffer(message.data() + sizeof head), send.bytes);
  const Rank to = send.message.peer;
  const auto bytes = sizeof head + static_cast<size_t>(send.bytes);
  // If sendControl() throws, the group breaks, and every transfer that the matcher holds ends with the error.
  leaving_.push_back(std::move(send));
  host_.sendControl(to, {message.data(), bytes});
  // A message that waits for room leaves when somebody polls. The engine polls for a group that is not idle, so the
  // send has not ended until then.
  if (host_.backlogged(to)) return;
  Transfer sent = std::move(leaving_.back());
  leaving_.pop_back();
  host_.onComplete(sent);
}

std::optional<Transfer> Matcher::withdraw(const calls::Completion& receive) {
  ownership_.assertOwned();
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const Transfer& transfer) {
    return transfer.completion.get() == &receive;
  });
  if (found == posted_.end()) return std::nullopt;
  Transfer withdrawn = std::move(*found);
  posted_.erase(found);
  return withdrawn;
}

void Matcher::post(Transfer transfer) {
  const Rank wanted = transfer.message.peer;
  const auto self = std::find_if(toSelf_.begin(), toSelf_.end(), [&](const Transfer& send) {
    return (wanted == me_ || wanted == calls::kAnySource) &&
           send.message.tag == transfer.message.tag;
  });
  if (self != toSelf_.end()) {
    Transfer send = std::move(*self);
    toSelf_.erase(self);
    copyToSelf(send, transfer);
    return;
  }
  for (auto& [from, messages] : announced_) {
    if (wanted != calls::kAnySource && wanted != from) continue;
    const auto found = std::find_if(messages.begin(), messages.end(), [&](const Announced& m) {
      return m.tag == transfer.message.tag;
    });
    if (found == messages.end()) continue;
    const Rank sender = from;
    Announced message = std::move(*found);
    messages.erase(found);
    announcedBytes_[sender] -= message.memory();
    if (messages.empty()) announced_.erase(sender);
    accept(sender, std::move(message), std::move(transfer));
    return;
  }
  posted_.push_back(std::move(transfer));
}

bool Matcher::onControl(Rank from, Bytes message) {
  ownership_.assertOwned();
  MatcherMessage head;
  if (message.size() < sizeof head) return false;
  std::memcpy(&head, message.data(), sizeof head);
  const Bytes data = message.subspan(sizeof head);
  if (head.header.kind == calls::kBuffered) {
    if (head.bytes < 0 || static_cast<uint64_t>(head.bytes) != data.size()) return false;
    onAnnounce(from, {.id = head.id,
                      .tag = head.tag,
                      .bytes = head.bytes,
                      .oneRun = false,
                      .data = {data.begin(), data.end()},
                      .buffered = true});
    return true;
  }
  if (!data.empty()) return false;
  if (head.header.kind == calls::kAccept) {
    onAccept(from, head.id);
    return true;
  }
  if (head.header.kind != calls::kAnnounce || head.bytes < 0) return false;
  onAnnounce(from,
             {.id = head.id, .tag = head.tag, .bytes = head.bytes, .oneRun = head.oneRun != 0});
  return true;
}

void Matcher::onAnnounce(Rank from, Announced message) {
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const Transfer& receive) {
    return (receive.message.peer == from || receive.message.peer == calls::kAnySource) &&
           receive.message.tag == message.tag;
  });
  if (found != posted_.end()) {
    Transfer receive = std::move(*found);
    posted_.erase(found);
    accept(from, std::move(message), std::move(receive));
    return;
  }
  size_t& bytes = announcedBytes_[from];
  if (bytes + message.memory() > kMaxAnnouncedBytes) {
    raise(ErrorKind::Resource,
          "rank {} has sent {} messages that this rank has not received; let it wait for this one "
          "from time to time",
          host_.jobRank(from), announced_[from].size());
  }
  bytes += message.memory();
  announced_[from].push_back(std::move(message));
}

void Matcher::accept(Rank from, Announced message, Transfer transfer) {
  if (message.bytes != transfer.bytes) {
    const int64_t expected = transfer.bytes;
    // The error ends it, like all transfers of the group.
    posted_.push_back(std::move(transfer));
    raise(ErrorKind::Mismatch,
          "rank {} sends {} bytes {} to rank {}, which receives {}: {} must have the same size",
          host_.jobRank(from), message.bytes, calls::describeTag(message.tag), host_.jobRank(me_),
          expected,
          message.tag < 0 ? "what one rank splits off for another, and the other expects from it,"
                          : "the tensors on both sides");
  }
  if (message.buffered) {
    copy(calls::Buffer(message.data.data()), calls::Buffer(transfer.message.buffer), message.bytes);
    transfer.completion->setSource(from);
    host_.onComplete(transfer);
    return;
  }
  MatcherMessage answer;
  answer.header.kind = calls::kAccept;
  answer.group = group_;
  answer.id = message.id;
  transfer.completion->setSource(from);
  transfer.oneRun = message.oneRun;
  transfer.isMatched = true;
  Incoming& incoming = receiving_[from];
  incoming.queue.push_back(std::move(transfer));
  if (incoming.channel == nullptr) incoming.channel = &host_.receiveChannel(from);
  if (incoming.queue.size() == 1) postMessages(incoming);
  host_.sendControl(from, transport::bytesOf(answer));
}

void Matcher::onAccept(Rank from, uint64_t id) {
  auto& awaiting = awaitingAccept_[from];
  const auto found = awaiting.find(id);
  if (found == awaiting.end()) {
    raise(ErrorKind::Transport, "rank {} accepts a message that was never announced",
          host_.jobRank(from));
  }
  found->second.isMatched = true;
  sending_[from].push_back(std::move(found->second));
  awaiting.erase(found);
  if (awaiting.empty()) awaitingAccept_.erase(from);
}

void Matcher::sendToSelf(Transfer send) {
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const Transfer& receive) {
    return (receive.message.peer == me_ || receive.message.peer == calls::kAnySource) &&
           receive.message.tag == send.message.tag;
  });
  if (found == posted_.end()) {
    toSelf_.push_back(std::move(send));
    return;
  }
  Transfer receive = std::move(*found);
  posted_.erase(found);
  copyToSelf(send, receive);
}

void Matcher::copyToSelf(Transfer& send, Transfer& receive) {
  if (send.bytes != receive.bytes) {
    toSelf_.push_back(std::move(send));
    posted_.push_back(std::move(receive));
    raise(ErrorKind::Mismatch, "rank {} sends itself {} bytes {} and receives {}",
          host_.jobRank(me_), toSelf_.back().bytes, calls::describeTag(toSelf_.back().message.tag),
          posted_.back().bytes);
  }
  copy(calls::Buffer(send.message.buffer), calls::Buffer(receive.message.buffer), send.bytes);
  receive.completion->setSource(me_);
  host_.onComplete(send);
  host_.onComplete(receive);
}

bool Matcher::advance() {
  ownership_.assertOwned();
  bool advanced = false;
  for (auto& [to, queue] : sending_) advanced |= pumpSend(to, queue);
  for (auto& [from, incoming] : receiving_) advanced |= pumpReceive(from, incoming);
  // idle() looks at all of them, and a group may have met many ranks.
  const auto isEmpty = [](const auto& entry) { return entry.second.empty(); };
  std::erase_if(sending_, isEmpty);
  std::erase_if(receiving_, isEmpty);
  while (!leaving_.empty() && !host_.backlogged(leaving_.front().message.peer)) {
    Transfer gone = std::move(leaving_.front());
    leaving_.pop_front();
    host_.onComplete(gone);
    advanced = true;
  }
  return advanced;
}

bool Matcher::pumpSend(Rank to, Queue& queue) {
  transport::SendChannel& channel = host_.sendChannel(to);
  if (!channel.isOpen()) return false;
  bool advanced = false;
  for (Transfer& transfer : queue) {
    const calls::Buffer buffer(transfer.message.buffer);
    while (transfer.moved < transfer.bytes) {
      const int64_t wanted = std::min(channel.slotBytes(), transfer.bytes - transfer.moved);
      const transport::Payload payload = buffer.payload(transfer.moved, wanted);
      if (!channel.put(channel.sent() + 1, payload, {})) break;
      transfer.moved += static_cast<int64_t>(payload.size());
      transfer.lastPut = channel.sent();
      advanced = true;
    }
    if (transfer.moved < transfer.bytes) break;
  }
  while (!queue.empty() && queue.front().moved == queue.front().bytes &&
         channel.flushed() >= queue.front().lastPut) {
    Transfer transfer = std::move(queue.front());
    queue.pop_front();
    host_.onComplete(transfer);
    advanced = true;
  }
  return advanced;
}

void Matcher::postMessages(const Incoming& incoming) {
  const Transfer& transfer = incoming.queue.front();
  if (!transfer.oneRun) return;
  const calls::Buffer buffer(transfer.message.buffer);
  const int64_t full = incoming.channel->slotBytes();
  uint64_t number = incoming.channel->released();
  for (int64_t offset = 0; offset < transfer.bytes; offset += full) {
    const int64_t length = std::min(full, transfer.bytes - offset);
    const auto run = buffer.at(offset, length);
    ++number;
    if (run.bytes == length)
      incoming.channel->post(number, {run.data, static_cast<size_t>(length)});
  }
}

bool Matcher::pumpReceive(Rank from, Incoming& incoming) {
  transport::ReceiveChannel& channel = *incoming.channel;
  Queue& queue = incoming.queue;
  bool advanced = false;
  while (!queue.empty()) {
    Transfer& transfer = queue.front();
    const calls::Buffer buffer(transfer.message.buffer);
    while (transfer.moved < transfer.bytes && channel.arrived() > channel.released()) {
      const uint64_t number = channel.released() + 1;
      const auto payload = channel.payload(number);
      const auto length = static_cast<int64_t>(payload.size());
      if (length > transfer.bytes - transfer.moved) {
        raise(ErrorKind::Transport, "rank {} sent more bytes than it had announced",
              host_.jobRank(from));
      }
      for (int64_t copied = 0; copied < length;) {
        const auto run = buffer.at(transfer.moved + copied, length - copied);
        // A sender that does not keep to its announcement may have had a message placed elsewhere in this buffer.
        if (run.data != payload.data() + copied) {
          std::memmove(run.data, payload.data() + copied, static_cast<size_t>(run.bytes));
        }
        copied += run.bytes;
      }
      transfer.moved += length;
      channel.release(number);
      advanced = true;
    }
    if (transfer.moved < transfer.bytes) return advanced;
    Transfer finished = std::move(transfer);
    queue.pop_front();
    if (!queue.empty()) postMessages(incoming);
    host_.onComplete(finished);
    advanced = true;
  }
  return advanced;
}

bool Matcher::idle() const {
  ownership_.assertOwned();
  const auto empty = [](const auto& queues) {
    return std::ranges::all_of(queues, [](const auto& entry) { return entry.second.empty(); });
  };
  return posted_.empty() && toSelf_.empty() && leaving_.empty() && empty(awaitingAccept_) &&
         empty(sending_) && empty(receiving_);
}

void Matcher::forEach(const std::function<void(Transfer&)>& visit) {
  ownership_.assertOwned();
  for (Transfer& transfer : posted_) visit(transfer);
  for (Transfer& transfer : toSelf_) visit(transfer);
  for (Transfer& transfer : leaving_) visit(transfer);
  for (auto& [peer, awaiting] : awaitingAccept_) {
    for (auto& [id, transfer] : awaiting) visit(transfer);
  }
  for (auto& [peer, queue] : sending_) {
    for (Transfer& transfer : queue) visit(transfer);
  }
  for (auto& [peer, incoming] : receiving_) {
    for (Transfer& transfer : incoming.queue) visit(transfer);
  }
}

void Matcher::abandon() {
  ownership_.assertOwned();
  for (auto& [from, incoming] : receiving_) {
    if (incoming.channel != nullptr) incoming.channel->withdrawPosts();
  }
}

void Matcher::clear() {
  ownership_.assertOwned();
  posted_.clear();
  toSelf_.clear();
  leaving_.clear();
  announced_.clear();
  announcedBytes_.clear();
  awaitingAccept_.clear();
  sending_.clear();
  receiving_.clear();
}

}  // namespace smddp::engine::operations
