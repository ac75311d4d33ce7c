// The collective operations of one group: those that wait for their turn and those that run.
//
// Operations begin in the order submitted. Execution n of the group, counted from 0, runs on track n % tracks, and
// begins when that track is free, and when no execution in flight uses memory that it writes, or writes memory that it
// uses. A barrier begins when all tracks are free. So when it ends, all earlier operations have ended on all ranks. When
// the ranks of the node have arrived at an execution, they agree (Team) on what one rank may not decide alone: whether
// tensors are read where they lie, and how many waiting requests are fused. kTransitions in operations.cc is the life of
// an execution.
//
// Ends an operation with its result. Errors go to the sentinel, which ends the operations that they concern
// (endBroken()). What the constructor takes outlives this; `metrics` may be null. Used by the thread that owns the engine.
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
             observe::Metrics::Group* metrics, int64_t numTracks);

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
  struct Operation {
    calls::Request request;
    calls::CompletionPtr completion;
    Deadline deadline;
    uint64_t sequence = 0;
    transport::CallFingerprint fingerprint;
    Nanoseconds submittedAt = 0;  // 0: it is not counted
    calls::Footprint footprint{request.input, request.output};
  };
  // See kTransitions.
  enum class Phase { Idle, Taken, Arrived, Preamble, Running };
  // A track, and the execution that runs on it, if one does.
  struct TrackState {
    TrackState(const Ownership& ownership, const team::Membership& membership, team::Team& team,
               int64_t index)
        : track(team.makeTrack(index)), executor(ownership, membership, track, team.bell()) {}
    TrackState(const TrackState&) = delete;
    TrackState& operator=(const TrackState&) = delete;

    team::Track track;
    plans::Executor executor;
    Phase phase = Phase::Idle;
    Nanoseconds beganAt = 0;
    // What metrics say of the execution, and since when it waits for what it does not wait for yet; 0: it does not.
    observe::Waited waited;
    Nanoseconds waitsSince = 0;
    std::vector<Operation> operations;  // several when fused
    collectives::Shape shape;           // of all of them together
    calls::Pieces input, output;
    plans::PlanCache::Held entry;  // its plan; held until the next execution on this track has one
    // Where this rank's buffers lie in communication memory. Null: they are private, or the choice of the plan does not
    // depend on that.
    std::optional<memory::BufferLocations> buffers;
  };
  struct Transition;
  static const Transition kTransitions[];

  bool advance(TrackState& state);
  bool takeTransition(TrackState& state);

  // Conditions of transitions.
  bool hasNext(TrackState&);
  bool decidesAfterArrival(TrackState& state);
  bool allArrived(TrackState& state) { return team_.allArrived(state.track); }
  bool isPreambleDone(TrackState& state) { return state.executor.preambleDone(); }
  bool isDone(TrackState& state) { return state.executor.done(); }
  // Their actions.
  void take(TrackState& state);
  void arrive(TrackState& state);
  void begin(TrackState& state);
  void agree(TrackState& state);
  void finish(TrackState& state);

  // The execution in flight that began first; null if there is none.
  TrackState* oldestInFlight();
  // Where the next execution will run.
  TrackState& nextTrack() { return *tracks_[started_ % tracks_.size()]; }
  // Gives a new execution its number on its track.
  void beginExecution(TrackState& state);
  // Of an execution that cannot advance, or has ended a wait. For metrics.
  void noteWait(TrackState& state);
  void endWait(TrackState& state, Nanoseconds& waited);
  // Counts an execution and its calls, `now` when they end. For metrics.
  void count(const TrackState& state, Nanoseconds now);
  void takeFusable(std::vector<Operation>& taken);
  bool canFuse(int64_t first, int64_t together);
  static bool conflicts(const std::vector<Operation>& running, const Operation& next);
  void combine(TrackState& state);
  std::optional<memory::BufferLocations> locate(const TrackState& state) const;
  void publish(TrackState& state);
  void run(TrackState& state, bool arrived);
  plans::Binding& bind(TrackState& state, const calls::Request& request,
                       const transport::CallFingerprint& call) const;
  void bindMates(TrackState& state, plans::Binding& binding) const;
  // Ends an operation with the cause of a break.
  void endWith(Operation& operation, const calls::Break& broken);
  calls::InFlight inFlightOf(const TrackState& state) const;

  process::Process& process_;
  const team::Membership& membership_;
  team::Team& team_;
  plans::Channels& channels_;
  plans::PlanCache& plans_;
  team::CallHistory& calls_;
  health::Sentinel& sentinel_;
  calls::EndedOperations& ended_;
  observe::Metrics::Group* const metrics_;  // null: nothing is counted
  std::vector<std::unique_ptr<TrackState>> tracks_;
  std::deque<Operation> pending_;
  uint64_t started_ = 0;  // executions
};

}  // namespace smddp::engine::operations
