// How a process group hears from processes outside any group: of a change of its members that is under way
// (peer_meeting.cc), and of who its members are to be (member_agreement.h).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/handle.h"
#include "bootstrap/note_parts.h"
#include "engine/engine.h"

namespace smddp::engine {

// Used by one thread at a time, which is not the engine's owner where nothing else is said. The engine outlives it.
class MeetingPoint {
 public:
  enum class Topic : uint32_t { Change = 1, Agreement = 2 };
  struct Note {
    const process::Peer* from;
    std::vector<std::byte> bytes;
  };

  explicit MeetingPoint(Engine& engine);
  Engine& engine() const { return engine_; }
  // The address of notes to this process group. No other one has the number.
  uint64_t mailbox() const { return mailbox_; }

  // How others reach this process, as text. `changes`, `rank`: bootstrap::Handle. Opens the network, because they may
  // be on other hosts. Throws Usage, Resource, Transport.
  std::string makeHandle(uint32_t changes, Rank rank) const;
  // Returns the members that texts name; those of a set in an order that is the same on all ranks. Throws Usage if one
  // is no handle or is there twice, or if none is this rank's.
  std::vector<bootstrap::Handle> parseHandles(const std::vector<std::string>& texts,
                                              bool isSet) const;
  // Meets the members. `spec` gets its rank and size from them. `uuid` names the change: no two have the same. Throws
  // what createGroup() does: Usage if this rank has used the uuid, Mismatch if another member has called this with
  // other members, Timeout if one has not called it with this uuid.
  std::shared_ptr<groups::Group> meet(groups::GroupSpec spec,
                                      const std::vector<bootstrap::Handle>& members, int64_t uuid,
                                      Nanoseconds timeout);

  // Makes sure that processes of this host share memory with this one. Throws Transport if they cannot.
  void mapMates(const std::vector<bootstrap::Introduction>& others);
  // On the owner. Oldest first. Notes of other topics stay.
  std::vector<Note> take(Topic topic);
  // On the owner. Does nothing if the process is lost.
  void send(const process::Peer& to, uint64_t mailbox, Topic topic,
            std::span<const std::byte> bytes);
  // Calls `isOver` on the owner again and again until it returns true, after a look for peers that are gone, and
  // `between` then, not on the owner. Throws what they throw, and what checkInterrupt() throws.
  void waitUntil(const std::function<bool()>& isOver, const std::function<void()>& between = {});

 private:
  friend class PeerMeeting;
  // What a process sends that sends for ever does not fill the memory.
  static constexpr size_t kMaxNotes = 1 << 16;
  void receive();

  Engine& engine_;
  const uint64_t mailbox_;
  uint32_t sent_ = 0;
  bootstrap::NoteParts parts_;                // control messages are short
  std::deque<std::pair<Topic, Note>> notes_;  // oldest first
  // Of changes: a rank that has given one up may be about to begin the next one.
  struct ChangeNote {
    const process::Peer* from;
    bootstrap::MeetingNote note;
  };
  std::deque<ChangeNote> changeNotes_;
  std::set<int64_t> usedUuids_;
};

}  // namespace smddp::engine
