#include "transport/wire.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"

namespace smddp::transport {
namespace {

template <typename T>
std::optional<T> read(Bytes message) {
  if (message.size() < sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, message.data(), sizeof(T));
  return value;
}

// Reads a message. nullopt unless it has exactly this kind and length.
template <typename T>
std::optional<T> readControl(Bytes message, ControlKind kind) {
  const auto header = parseControlHeader(message);
  if (!header || header->kind != static_cast<uint8_t>(kind)) return std::nullopt;
  const auto value = read<T>(message);
  if (!value || message.size() - sizeof(T) != header->tailBytes) return std::nullopt;
  return value;
}

}  // namespace

std::optional<ControlHeader> parseControlHeader(Bytes message) {
  const auto header = read<ControlHeader>(message);
  if (!header || header->version != kWireVersion) return std::nullopt;
  return header;
}

std::optional<OpenMessage> parseOpen(Bytes message) {
  const auto open = readControl<OpenMessage>(message, ControlKind::Open);
  if (!open || open->header.tailBytes != 0 || open->reserved != 0) return std::nullopt;
  if (open->source < 0 || open->destination < 0) return std::nullopt;
  if (open->window < 1 || open->window > kMaxWindow) return std::nullopt;
  if (open->slotBytes < 1 || open->slotBytes > kMaxSlotBytes) return std::nullopt;
  return open;
}

std::optional<GrantMessage> parseGrant(Bytes message) {
  const auto grant = readControl<GrantMessage>(message, ControlKind::Grant);
  if (!grant || grant->header.tailBytes != 0) return std::nullopt;
  return grant;
}

std::optional<CloseMessage> parseClose(Bytes message) {
  const auto close = readControl<CloseMessage>(message, ControlKind::Close);
  if (!close || close->header.tailBytes != 0) return std::nullopt;
  return close;
}

std::optional<ParsedAbort> parseAbort(Bytes message) {
  const auto abort = readControl<AbortMessage>(message, ControlKind::Abort);
  if (!abort) return std::nullopt;
  const Bytes tail = message.subspan(sizeof(AbortMessage));
  return ParsedAbort{
      abort->group, abort->from, {reinterpret_cast<const char*>(tail.data()), tail.size()}};
}

std::vector<std::byte> makeAbort(uint64_t group, uint64_t from, std::string_view text) {
  text = text.substr(0, kMaxControlBytes - sizeof(AbortMessage));
  AbortMessage head;
  head.group = group;
  head.from = from;
  head.header.tailBytes = static_cast<uint32_t>(text.size());
  std::vector<std::byte> message(sizeof(head) + text.size());
  std::memcpy(message.data(), &head, sizeof(head));
  std::copy_n(reinterpret_cast<const std::byte*>(text.data()), text.size(),
              message.begin() + sizeof(head));
  return message;
}

void raiseOtherNetwork(std::string_view ours) {
  raise(
      ErrorKind::Transport,
      "this rank uses {} between nodes, and a peer does not, or has another release of smddp: set "
      "SMDDP_PROVIDER to the same value on all ranks (sockets, if not all hosts have a card)",
      ours);
}

}  // namespace smddp::transport
