#include "engine/team/blame.h"

#include <fmt/format.h>

#include <cstring>

namespace smddp::engine::team {
namespace {

template <typename T>
std::optional<T> parse(transport::Bytes bytes, uint8_t kind) {
  T message;
  if (bytes.size() != sizeof message) return std::nullopt;
  std::memcpy(&message, bytes.data(), sizeof message);
  if (message.header.kind != kind) return std::nullopt;
  return message;
}

}  // namespace

// rank + 1 in 24 bits, why in 8, reached in 32. Example: rank 3, NotCalled (1), last call #7: 0x00000401'00000007.
uint64_t Blame::pack() const {
  return static_cast<uint64_t>(rank + 1) << 40 | static_cast<uint64_t>(why) << 32 | reached;
}

Blame Blame::unpack(uint64_t packed, int size) {
  const auto rank = static_cast<int64_t>(packed >> 40) - 1;
  const auto why = static_cast<uint8_t>(packed >> 32);
  if (rank < 0 || rank >= size || why > static_cast<uint8_t>(Why::Unreachable)) return {};
  return {static_cast<Rank>(rank), static_cast<Why>(why), static_cast<uint32_t>(packed)};
}

std::string Blame::describe() const {
  switch (why) {
    case Why::Unknown: break;
    case Why::NotCalled:
      return reached == 0 ? "has not made any call yet"
                          : fmt::format("has not made this call yet (its last was #{})", reached);
    case Why::Stopped: return "is stopped (SIGSTOP, a debugger or a frozen container)";
    case Why::Silent: return "does not answer (stopped, or its host is cut off)";
    case Why::Unreachable: return "cannot be reached: its host does not answer (down or cut off)";
  }
  return "";
}

std::optional<InquiryMessage> parseInquiry(transport::Bytes message) {
  return parse<InquiryMessage>(message, calls::kInquiry);
}

std::optional<AnswerMessage> parseAnswer(transport::Bytes message) {
  return parse<AnswerMessage>(message, calls::kAnswer);
}

std::optional<LeftMessage> parseLeft(transport::Bytes message) {
  return parse<LeftMessage>(message, calls::kLeft);
}

std::vector<std::byte> makeTrouble(uint64_t group, const Trouble& trouble) {
  const std::string text =
      trouble.text.substr(0, transport::kMaxControlBytes - sizeof(TroubleMessage));
  TroubleMessage head;
  head.group = group;
  head.calls = trouble.calls;
  head.header.tailBytes = static_cast<uint32_t>(text.size());
  std::vector<std::byte> message(sizeof head + text.size());
  std::memcpy(message.data(), &head, sizeof head);
  std::memcpy(message.data() + sizeof head, text.data(), text.size());
  return message;
}

std::optional<Trouble> parseTrouble(transport::Bytes message) {
  TroubleMessage head;
  if (message.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, message.data(), sizeof head);
  const transport::Bytes tail = message.subspan(sizeof head);
  if (head.header.kind != calls::kTrouble || head.header.tailBytes != tail.size())
    return std::nullopt;
  return Trouble{head.calls, {reinterpret_cast<const char*>(tail.data()), tail.size()}};
}

void Inquiries::asked(Rank rank, Nanoseconds now) {
  Entry& entry = entries_[rank];
  if (!entry.unansweredSince) entry.unansweredSince = now;
}

void Inquiries::answered(Rank rank, const Blame& blame) {
  const auto entry = entries_.find(rank);
  if (entry != entries_.end()) entry->second = {std::nullopt, blame};
}

Blame Inquiries::of(Rank rank) const {
  const auto found = entries_.find(rank);
  return found != entries_.end() && found->second.blame.definite() ? found->second.blame
                                                                   : Blame{rank};
}

bool Inquiries::isSilent(Rank rank, Nanoseconds now) const {
  const auto found = entries_.find(rank);
  return found != entries_.end() && found->second.unansweredSince &&
         now - *found->second.unansweredSince > kSilence;
}

}  // namespace smddp::engine::team
