// The groups of an engine: those it is a member of, those with something in flight, and those it has left whose memory
// others may still use.
//
// Threads: everything on the thread that owns the engine. Ends with the engine, before the process's state does.
// Errors: an action that throws while the engine runs breaks the groups with something in flight (failActive).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/ownership.h"
#include "common/recent_set.h"
#include "engine/groups/group.h"
#include "engine/process/process.h"

namespace smddp::engine::groups {

class GroupRegistry {
 public:
  // What another process has sent to a mailbox of this one: a number that no group has. Both may be in no group.
  struct Note {
    const process::Peer* from;
    std::vector<std::byte> bytes;
  };
  // Receives the process's control messages from now on.
  GroupRegistry(const Ownership& ownership, process::Process& process);
  GroupRegistry(const GroupRegistry&) = delete;
  GroupRegistry& operator=(const GroupRegistry&) = delete;

  // Takes a group that has joined, and gives it the control messages that faster ranks have sent to it before.
  void add(const std::shared_ptr<Group>& group);
  // Leaves the group, unless it has been left. What is in flight ends with an error that says that this rank `how`.
  void leave(const std::shared_ptr<Group>& group, const char* how = "left the group");
  // Leaves all groups; from now on none becomes active.
  void leaveAll();
  bool hasLeftAll() const {
    ownership_.assertOwned();
    return hasLeftAll_;
  }
  // For the child of a fork, which has one thread and a copy of this object. Returns the groups that the parent had not
  // left, as a text such as group "a", group "b".
  std::string namesInChild() const SMDDP_NO_THREAD_ANALYSIS;
  // Frees the memory of groups that nobody can touch any more. A mate may leave later than this rank, so this is called
  // again and again.
  void reap();
  // True if an operation other than a receive is in flight: other ranks may need this one for it.
  bool hasOpenExceptReceives() const;
  // True if the ranks of other nodes have received everything that this one has sent in the groups that it has left.
  bool areRemoteRanksDone();
  // Forgets the groups that were left. Called at the end, when no thread runs the engine any more.
  void clear();

  // `group` may have something in flight.
  void activate(Group& group);
  // Nothing is in flight.
  bool idle() const {
    ownership_.assertOwned();
    return active_.empty();
  }
  // Oldest first.
  std::vector<Note> takeNotes(uint64_t mailbox);
  static void sendNote(const process::Peer& to, uint64_t mailbox, std::span<const std::byte> bytes);
  // This rank could not make the group of this number. Ranks that have made it, and wait for this one, get the error.
  void refuse(uint64_t id, const calls::Break& broken);
  bool isActiveAcrossNodes() const;
  // Does what can be done now for what is in flight; true when anything advanced.
  bool advance();
  // From now on the health check looks for ranks that have died in groups that are idle, too.
  void checkIdleGroups() {
    ownership_.assertOwned();
    checksIdleGroups_ = true;
  }
  bool checksIdleGroups() const {
    ownership_.assertOwned();
    return checksIdleGroups_;
  }
  // Looks for everything that can have gone wrong.
  void checkHealth();
  // If a group has failed, tells the ranks of the others.
  void tellOfTrouble();
  // Breaks the groups with something in flight.
  void failActive(const Error& error);
  // Appends what operations that have ended leave behind. Groups that are idle now are active no longer.
  void moveLeftoversTo(calls::Leftovers& leftovers);

 private:
  // To a group that this rank has not made yet, or to a mailbox.
  struct EarlyMessage {
    uint64_t group;
    process::Peer* from;
    std::vector<std::byte> bytes;
    size_t memory() const { return sizeof *this + bytes.size(); }
  };
  void dispatch(process::Peer& from, transport::Bytes message);
  void keepEarly(uint64_t id, process::Peer& from, transport::Bytes message)
      SMDDP_REQUIRES(ownership_);
  std::deque<EarlyMessage> takeEarly(uint64_t id) SMDDP_REQUIRES(ownership_);
  static void tell(const process::Peer& to, transport::Bytes message);

  const Ownership& ownership_;
  process::Process& process_;
  std::map<uint64_t, std::shared_ptr<Group>> joined_ SMDDP_GUARDED_BY(ownership_);  // by id
  std::vector<Group*> active_ SMDDP_GUARDED_BY(ownership_);
  std::vector<std::shared_ptr<Group>> left_
      SMDDP_GUARDED_BY(ownership_);  // until nobody can touch their memory
  calls::Leftovers ofEndedGroups_ SMDDP_GUARDED_BY(ownership_);
  std::deque<EarlyMessage> early_ SMDDP_GUARDED_BY(ownership_);  // oldest first
  size_t earlyBytes_ SMDDP_GUARDED_BY(ownership_) = 0;           // their memory
  // Groups that take no messages any more. The value is sent to ranks that wait for this one there. Those that were
  // freed or refused have one; those that had too many early messages have none.
  RecentMap<std::vector<std::byte>> closed_ SMDDP_GUARDED_BY(ownership_);
  bool checksIdleGroups_ SMDDP_GUARDED_BY(ownership_) = false;
  bool hasLeftAll_ SMDDP_GUARDED_BY(ownership_) = false;
};

}  // namespace smddp::engine::groups
