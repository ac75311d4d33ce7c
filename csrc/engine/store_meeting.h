// The ranks of a new group meet in a store (bootstrap/rendezvous.h): they exchange introductions, find out who shares a
// node, and if there are several, open the network and exchange its addresses.
//
// A rank that cannot go on leaves a note in the store. In each wait the others look for notes and signals, and whether
// a member that they know is lost.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bootstrap/rendezvous.h"
#include "bootstrap/store.h"
#include "common/seal.h"
#include "engine/engine.h"
#include "engine/groups/meeting.h"

namespace smddp::engine {

class StoreMeeting final : public groups::Meeting {
 public:
  // The arguments outlive the meeting. `timeout` bounds each wait.
  StoreMeeting(Engine& engine, bootstrap::Store& store, const groups::GroupSpec& spec,
               Nanoseconds timeout, const Engine::KnownMembers& known);

  groups::Members exchange(const bootstrap::Introduction& mine) override;
  // Waits for a lifeline to every process of another node.
  void complete() override;
  Error tell(const Error& error) noexcept override;

 private:
  bootstrap::Rendezvous& begin(std::optional<bootstrap::Rendezvous>& rendezvous,
                               const std::string& name);
  // Looks for signals. Returns the known members that are lost.
  std::vector<bootstrap::Rendezvous::Loss> look();
  void checkNotes();
  [[noreturn]] void raiseUnreached(const process::Peers::Unreached& unreached) const;
  [[noreturn]] void raiseMissing(const std::vector<Rank>& missing) const;
  void tellOtherGroups(const Error& error) noexcept;

  Engine& engine_;
  bootstrap::Store& store_;
  const groups::GroupSpec& spec_;
  const Nanoseconds timeout_;
  const Engine::KnownMembers& known_;
  const Seal seal_;
  // Here the ranks find out who shares a node, and if there are several nodes, then here exchange their addresses.
  std::optional<bootstrap::Rendezvous> nodeRendezvous_, networkRendezvous_;
  std::vector<bootstrap::Introduction> introductions_;
  bool othersKnow_ = false;  // that this rank has failed
};

}  // namespace smddp::engine
