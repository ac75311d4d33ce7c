#include "bootstrap/note_parts.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"

namespace smddp::bootstrap {
namespace {

// What a process sends that sends for ever does not fill the memory.
constexpr size_t kMaxIncomplete = 1 << 10;
constexpr size_t kMaxParts = 1 << 12;

struct Head {
  uint32_t topic;
  uint32_t number;
  uint32_t index;
  uint32_t count;
};

}  // namespace

std::vector<std::vector<std::byte>> partsOf(uint32_t topic, uint32_t number,
                                            std::span<const std::byte> bytes, size_t partBytes) {
  const size_t room = partBytes - sizeof(Head);
  Head head{topic, number, 0, static_cast<uint32_t>((bytes.size() + room - 1) / room)};
  SMDDP_CHECK(head.count > 0 && head.count <= kMaxParts, "a note of {} bytes", bytes.size());
  std::vector<std::vector<std::byte>> parts;
  for (; head.index < head.count; ++head.index) {
    const auto content =
        bytes.subspan(head.index * room, std::min(room, bytes.size() - head.index * room));
    auto& part = parts.emplace_back(sizeof head + content.size());
    std::memcpy(part.data(), &head, sizeof head);
    std::ranges::copy(content, part.begin() + sizeof head);
  }
  return parts;
}

std::optional<Note> NoteParts::add(const void* sender, std::span<const std::byte> part) {
  Head head;
  if (part.size() <= sizeof head) return std::nullopt;
  std::memcpy(&head, part.data(), sizeof head);
  if (head.count > kMaxParts || head.index >= head.count) return std::nullopt;
  const auto key = std::pair(sender, head.number);
  auto found = incomplete_.find(key);
  if (found == incomplete_.end()) {
    if (incomplete_.size() >= kMaxIncomplete) return std::nullopt;
    Incomplete none{head.count, std::vector<std::vector<std::byte>>(head.count)};
    found = incomplete_.emplace(key, std::move(none)).first;
  }
  auto& [missing, parts] = found->second;
  if (parts.size() != head.count || !parts[head.index].empty()) return std::nullopt;
  parts[head.index].assign(part.begin() + sizeof head, part.end());
  if (--missing > 0) return std::nullopt;
  Note note{head.topic, {}};
  for (const auto& bytes : parts) note.bytes.insert(note.bytes.end(), bytes.begin(), bytes.end());
  incomplete_.erase(found);
  return note;
}

}  // namespace smddp::bootstrap
