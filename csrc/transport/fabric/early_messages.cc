#include "transport/fabric/early_messages.h"

#include <utility>

#include "common/log.h"

namespace smddp::transport::fabric {

void EarlyMessages::introduce(uint64_t id, PeerId peer) {
  const auto [it, isNew] = senders_.try_emplace(id);
  Sender& sender = it->second;
  if (!isNew) --unknownSenders_;
  sender.peer = peer;
  if (sender.overflowed) overflowed_.push_back(peer);
  if (!sender.early.empty()) introduced_.push_back(id);
}

void EarlyMessages::arrived(uint64_t id, uint64_t sequence, Bytes message, Sink& sink) {
  auto it = senders_.find(id);
  if (it == senders_.end()) {
    if (unknownSenders_ >= kMaxUnknownSenders) {
      SMDDP_LOG(Debug, "transport/fabric", "dropped a message of unknown sender {:016x}", id);
      return;
    }
    ++unknownSenders_;
    it = senders_.try_emplace(id).first;
  }
  Sender& sender = it->second;
  // If early messages wait for deliverIntroduced(), this one must wait behind them.
  if (sender.peer >= 0 && sequence == sender.next && sender.early.empty()) {
    ++sender.next;
    sink.onControl(sender.peer, message);
    return;
  }
  if (sequence < sender.next || sender.overflowed) return;
  if (sender.early.size() >= (sender.peer < 0 ? kMaxFromUnknown : kMaxOutOfOrder)) {
    sender.overflowed = true;
    if (sender.peer >= 0) overflowed_.push_back(sender.peer);
    return;
  }
  sender.early.try_emplace(sequence, message.begin(), message.end());
  if (sender.peer >= 0) deliverReady(sender, sink);
}

void EarlyMessages::deliverReady(Sender& sender, Sink& sink) {
  while (!sender.early.empty() && sender.early.begin()->first == sender.next) {
    const auto message = sender.early.extract(sender.early.begin());
    ++sender.next;
    sink.onControl(sender.peer, message.mapped());
  }
}

void EarlyMessages::deliverIntroduced(Sink& sink) {
  for (const uint64_t id : std::exchange(introduced_, {})) deliverReady(senders_.at(id), sink);
}

std::vector<PeerId> EarlyMessages::takeOverflowed() { return std::exchange(overflowed_, {}); }

}  // namespace smddp::transport::fabric
