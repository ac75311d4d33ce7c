// A track, and the execution that runs on it, if one does: one operation, or several that were fused.
//
// Its operations come from Operations, whose table of transitions calls the functions here. Used by the thread that
// owns the engine.
#pragma once

#include <optional>
#include <vector>

#include "collectives/collective.h"
#include "engine/calls/completion.h"
#include "engine/calls/footprint.h"
#include "engine/calls/in_flight.h"
#include "engine/calls/request.h"
#include "engine/memory/region.h"
#include "engine/observe/metrics.h"
#include "engine/plans/channels.h"
#include "engine/plans/executor.h"
#include "engine/plans/plan_cache.h"
#include "engine/process/process.h"
#include "engine/team/membership.h"
#include "engine/team/team.h"
#include "engine/team/track.h"

namespace smddp::engine::operations {

struct Operation {
  calls::Request request;
  calls::CompletionPtr completion;
  Deadline deadline;
  uint64_t sequence = 0;
  transport::CallFingerprint fingerprint;
  Nanoseconds submittedAt = 0;  // 0: it is not counted
  calls::Footprint footprint{request.input, request.output};
};

// See Operations::kTransitions.
enum class Phase { Idle, Taken, Arrived, Preamble, Met, Agreed, Running, Done, Any };
enum class Event { Turn, Break };

class Execution {
 public:
  // The arguments outlive this object. `isCounted`: metrics count it.
  Execution(process::Process& process, const team::Membership& membership, team::Team& team,
            plans::Channels& channels, plans::PlanCache& plans, bool isCounted, int64_t index);
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  team::Track track;
  plans::Executor executor;
  Phase phase = Phase::Idle;
  Nanoseconds beganAt = 0;
  // The waiting times for metrics, and the moment at which the present wait began; 0 if the execution does not wait.
  observe::Waited waited;
  Nanoseconds waitsSince = 0;
  std::vector<Operation> operations;  // several when fused
  team::Agreement agreement;          // from Agreed on
  size_t plannedFor = 0;              // so many operations, by the plan that has begun; 0: none has
  collectives::Shape shape;           // the shape of all of them together
  calls::Pieces input, output;
  plans::PlanCache::Held entry;  // keeps its plan until the next execution on this track has one
  // The places of this rank's buffers in communication memory. Null: they are private, or the choice of the plan does
  // not depend on that.
  std::optional<memory::BufferLocations> buffers;

  // Gives a new execution its number on the track.
  void renew();
  // Sets the shape and the buffers: those of all operations, one behind the other.
  void combine();
  // The places at which mates find this rank's buffers, if all of them lie in communication memory.
  std::optional<memory::BufferLocations> locate() const;

  // Conditions of transitions.
  bool decidesAfterArrival() { return buffers.has_value(); }
  bool allArrived() { return team_.allArrived(track); }
  bool isPreambleDone() { return executor.preambleDone(); }
  bool advancesPlan();
  // A plan for more operations is not right, nor is one that has copied although a mate has not.
  bool isPlanRight();
  bool isDone() { return executor.done(); }
  // Their actions.
  void arrive();
  void begin();
  void meet() { endWait(waited.node); }
  void chooseAgain();
  void sendGrants();

  // Does the work of a plan's steps at once, for a caller that waits (Operations::runOneShot). True if it has summed;
  // false if the other ranks are late.
  bool sumAtOnce(const plans::PlanCache::Entry& oneShot, const calls::Request& request,
                 const transport::CallFingerprint& call);
  // Notes for the metrics that the execution cannot advance.
  void noteWait();
  calls::InFlight inFlight() const;

 private:
  void endWait(Nanoseconds& ended);
  void publish();
  // Starts the plan, after its preamble if all have `arrived`. (sumAtOnce() starts none.)
  void startPlan(bool arrived);
  // Fills in what does not depend on buffers. The caller adds input and output.
  plans::Binding& bind(const calls::Request& request, const transport::CallFingerprint& call);
  void bindMates(plans::Binding& binding) const;

  process::Process& process_;
  const team::Membership& membership_;
  team::Team& team_;
  plans::Channels& channels_;
  plans::PlanCache& plans_;
  const bool isCounted_;
};

}  // namespace smddp::engine::operations
