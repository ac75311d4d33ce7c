// What processes tell one another to become a group without a store or a group that they are in: the handle, by which
// others find a process, and the notes that the members of a new group send to one another (engine/peer_meeting.cc).
// Both come from other processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/introduction.h"
#include "common/seal.h"
#include "common/types.h"

namespace smddp::bootstrap {

// How others reach a process, for one of its process groups.
struct Handle {
  Introduction introduction;  // without an entry for a group
  uint64_t mailbox = 0;       // the address of notes for that process group
  uint32_t changes = 0;       // how often its members have changed so far; 0: it has no members yet
  Rank rank = 0;              // in the group, or the one that it began with
};

// As printable text, sealed. Throws Usage if a field is too long.
std::string textOf(const Handle& handle, const Seal& seal);
// Throws Usage if the text is none, or was made with another job token or by another version.
Handle parseHandle(const std::string& text, const Seal& seal);

// Sorts handles of which nobody has said the order, in the same way on all ranks: members of a group in their order,
// before those that have none.
void sortHandles(std::vector<Handle>& handles);
// Equal for equal members in the same order.
uint64_t digestOf(const std::vector<Handle>& handles);

// What one member of a new group tells another.
struct MeetingNote {
  static constexpr size_t kMaxText = 400;

  int64_t uuid = 0;        // of the change, as the user numbers it
  uint64_t digest = 0;     // of the members
  uint32_t round = 0;      // 1: the entry; 2: the group exists here
  uint32_t errorKind = 0;  // if there is a text
  std::string text{};      // why this member cannot take part; empty: it does
  std::vector<std::byte> entry{};
};

// A text that is too long is cut.
std::vector<std::byte> serialise(const MeetingNote& note);
// Throws Transport if the bytes are no note.
MeetingNote parseNote(std::span<const std::byte> blob);

}  // namespace smddp::bootstrap
