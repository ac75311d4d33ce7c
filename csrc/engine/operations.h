// The collective operations of one group: those that wait for their turn and those that run.
//
// Operations begin in the order submitted. Execution n of the group, counted from 0, runs on track n % tracks, and
// begins when that track is free. A barrier begins when all tracks are free. So when it ends, all earlier operations
// have ended on all ranks. When the ranks of the node have arrived at an execution, they agree (Team) on what one rank
// may not decide alone: whether tensors are read where they lie, and how many waiting requests are fused. kTransitions
// in operations.cc is the life of an execution.
//
// Ends an operation with its result. Errors go to the sentinel, which ends the operations that they concern
// (endFrom()). What the constructor takes outlives this. Used by the thread that owns the engine.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine/call_history.h"
#include "engine/channels.h"
#include "engine/continuation_queue.h"
#include "engine/executor.h"
#include "engine/membership.h"
#include "engine/plan_cache.h"
#include "engine/request.h"
#include "engine/sentinel.h"
#include "engine/standstill.h"
#include "engine/team.h"

namespace smddp::engine {

class Operations final : public Watched {
 public:
  Operations(Process& process, const Membership& membership, Team& team, Channels& channels,
             PlanCache& plans, CallHistory& calls, Sentinel& sentinel,
             ContinuationQueue& continuations, int64_t numTracks);

  // Queues an operation. It begins in advance().
  void submit(Request request, CompletionPtr completion);
  // The fast path, for a caller that waits while nothing is in flight: a small vector that all ranks reduce at about
  // the same time never becomes an operation in flight. True: the operation has ended, or the other ranks are late and
  // it is in flight like any other. False: the fast path does not serve this call; the caller has to submit() it.
  bool runOneShot(Request& request, const CompletionPtr& completion);
  bool idle() const;
  // Appends the completions of all that has not ended.
  void appendOpen(std::vector<CompletionPtr>& open) const;
  size_t numTracks() const { return executions_.size(); }

  // Watched.
  std::vector<Standstill> standstills() override;
  std::optional<Standstill> standstillOf(const Completion& completion) override;
  void endFrom(const Break& broken) override;
  std::optional<uint64_t> oldest() const override;
  bool advance() override;

 private:
  struct Operation {
    Request request;
    CompletionPtr completion;
    Deadline deadline;
    uint64_t sequence = 0;
    transport::CallFingerprint call;
  };
  // See kTransitions.
  enum class Phase { Idle, Taken, Arriving, Preamble, Running };
  // A track, and the execution that runs on it, if one does.
  struct Execution {
    Execution(const Ownership& ownership, const Membership& membership, Team& team, int64_t index)
        : track(team.makeTrack(index)), executor(ownership, membership, track, team.bell()) {}
    Execution(const Execution&) = delete;
    Execution& operator=(const Execution&) = delete;

    Track track;
    Executor executor;
    Phase phase = Phase::Idle;
    std::vector<Operation> operations;  // several when fused
    collectives::Shape shape;           // of all of them together
    Pieces input, output;
    PlanCache::Held entry;  // its plan; held until the next execution on this track has one
    // Where this rank's buffers lie. Set only if they are shared and the choice of the plan depends on it.
    std::optional<BufferLocations> buffers;
  };
  struct Transition;
  static const Transition kTransitions[];

  bool advance(Execution& execution);
  bool step(Execution& execution);

  // Conditions of transitions.
  bool hasNext(Execution&);
  bool mustAskMates(Execution& execution);
  bool allArrived(Execution& execution) { return team_.allArrived(execution.track); }
  bool isPreambleDone(Execution& execution) { return execution.executor.preambleDone(); }
  bool isDone(Execution& execution) { return execution.executor.done(); }
  // Their actions.
  void take(Execution& execution);
  void arrive(Execution& execution);
  void begin(Execution& execution);
  void agree(Execution& execution);
  void finish(Execution& execution);

  // The oldest execution that runs; null if none does.
  Execution* oldestExecution();
  // Where the next execution will run.
  Execution& nextExecution() { return *executions_[started_ % executions_.size()]; }
  // Numbers a new execution on its track.
  void beginExecution(Execution& execution);
  void takeFusable(std::vector<Operation>& taken);
  bool haveSamePreamble(int64_t one, int64_t several);
  void combine(Execution& execution);
  std::optional<BufferLocations> locate(const Execution& execution) const;
  void publish(Execution& execution);
  void run(Execution& execution, bool arrived);
  Binding& bind(Execution& execution, const Request& request,
                const transport::CallFingerprint& call) const;
  void bindMates(Execution& execution, Binding& binding) const;
  // Ends an operation with the cause of a break.
  void endWith(Operation& operation, const Break& broken);
  Standstill standstillOf(const Execution& execution) const;

  Process& process_;
  const Membership& membership_;
  Team& team_;
  Channels& channels_;
  PlanCache& plans_;
  CallHistory& calls_;
  Sentinel& sentinel_;
  ContinuationQueue& continuations_;
  std::vector<std::unique_ptr<Execution>> executions_;  // by track
  std::deque<Operation> pending_;
  uint64_t started_ = 0;  // executions
};

}  // namespace smddp::engine
