// The collective operations of one group: those that wait for their turn and those that run.
//
// Operations begin in the order submitted. Execution n of the group, counted from 0, runs on track n % tracks. It
// begins when that track is free. It also waits until no execution in flight uses memory that it writes, or writes
// memory that it uses. A barrier begins when all tracks are free. So when it ends, all earlier operations have ended on
// all ranks.
// When the ranks of the node have arrived at an execution, they agree (Team) on what one rank may not decide alone:
// whether tensors are read where they lie, and how many waiting requests are fused. kTransitions in operations.cc is
// the life of an execution.
//
// Ends an operation with its result. Errors go to the sentinel, which ends the operations that they concern
// (endBroken()). The arguments of the constructor outlive this object; `metrics` may be null. Fused allreduces have at
// most `fusionBytes` together. Used by the thread that owns the engine.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine/calls/ended_operations.h"
#include "engine/calls/footprint.h"
#include "engine/calls/in_flight.h"
#include "engine/calls/request.h"
#include "engine/health/sentinel.h"
#include "engine/observe/metrics.h"
#include "engine/operations/execution.h"
#include "engine/plans/channels.h"
#include "engine/plans/executor.h"
#include "engine/plans/plan_cache.h"
#include "engine/team/call_history.h"
#include "engine/team/membership.h"
#include "engine/team/team.h"

namespace smddp::engine::operations {

class Operations final : public calls::Watched {
 public:
  Operations(process::Process& process, const team::Membership& membership, team::Team& team,
             plans::Channels& channels, plans::PlanCache& plans, team::CallHistory& calls,
             health::Sentinel& sentinel, calls::EndedOperations& ended,
             observe::Metrics::Group* metrics, int64_t numTracks, int64_t fusionBytes);

  // Queues an operation. It begins in advance().
  void submit(calls::Request request, calls::CompletionPtr completion);
  // The fast path, for a caller that waits while nothing is in flight: a small vector that all ranks reduce at about
  // the same time never becomes an operation in flight. True: the operation has ended, or the other ranks are late and
  // it is in flight like any other. False: the fast path does not serve this call; the caller has to submit() it.
  bool runOneShot(calls::Request& request, const calls::CompletionPtr& completion);
  bool idle() const;
  // Appends the completions of all that has not ended.
  void appendOpen(std::vector<calls::CompletionPtr>& open) const;
  size_t numTracks() const { return tracks_.size(); }

  // Watched.
  std::vector<calls::InFlight> inFlight() override;
  std::optional<calls::InFlight> inFlightOf(const calls::Completion& completion) override;
  void endBroken(const calls::Break& broken) override;
  std::optional<uint64_t> oldest() const override;
  bool advance() override;

 private:
  template <typename Result>
  struct Function;
  struct Transition;
  static const Transition kTransitions[];

  bool advance(Execution& state);
  // Takes the transition of the table, if there is one.
  bool step(Event event, Execution& state);

  // Conditions of transitions. (Others are functions of Execution.)
  bool hasNext(Execution&);
  bool isEndedByMate(Execution& state);
  bool isConcerned(Execution& state);
  // Their actions.
  void take(Execution& state);
  void agree(Execution& state);
  void completeAll(Execution& state);
  void end(Execution& state);
  void abandon(Execution& state);

  // Parts of runOneShot(): the first returns the plan if the fast path serves the call; the second lets the call go on
  // in the table.
  const plans::PlanCache::Entry* oneShotPlan(const calls::Request& request);
  void goOnInTable(Execution& state, Operation operation);
  // The execution in flight that began first; null if there is none.
  Execution* oldestInFlight();
  // The track on which the next execution will run.
  Execution& nextTrack() { return *tracks_[started_ % tracks_.size()]; }
  // Counts an execution and its calls, `now` when they end. For metrics.
  void count(const Execution& state, Nanoseconds now);
  void takeFusable(std::vector<Operation>& taken);
  bool canFuse(int64_t first, int64_t together);
  static bool conflicts(const std::vector<Operation>& running, const Operation& next);
  // Ends an operation with the cause of a break.
  void endWith(Operation& operation, const calls::Break& broken);

  process::Process& process_;
  const team::Membership& membership_;
  team::Team& team_;
  plans::PlanCache& plans_;
  team::CallHistory& calls_;
  health::Sentinel& sentinel_;
  calls::EndedOperations& ended_;
  observe::Metrics::Group* const metrics_;  // null: nothing is counted
  const int64_t fusionBytes_;
  std::vector<std::unique_ptr<Execution>> tracks_;
  std::deque<Operation> pending_;
  uint64_t started_ = 0;  // executions
};

}  // namespace smddp::engine::operations
