// Makes a group of processes that know one another's handles (bootstrap/handle.h), which the caller has brought to all
// of them: without a store, and without a group that they are in. So the members of a process group can change.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "bootstrap/handle.h"
#include "engine/engine.h"

namespace smddp::engine {

// Where a process group waits for notes of other processes: of the change of members that is under way, and of later
// ones. Used by one thread at a time. The engine outlives it.
class MeetingPoint {
 public:
  explicit MeetingPoint(Engine& engine);

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

 private:
  friend class PeerMeeting;
  struct Note {
    const process::Peer* from;
    bootstrap::MeetingNote note;
  };

  Engine& engine_;
  const uint64_t mailbox_;
  std::set<int64_t> usedUuids_;
  // Not yet read. A rank that has given a change up may be about to begin the next one.
  std::deque<Note> notes_;
};

}  // namespace smddp::engine
