// A communicator: the ranks of one c10d process group, and the operations they have in flight.
//
// The parts of a group do its work. Callers use them directly. Each uses only those above it in the list of members.
// The functions of Group concern several of them.
//
// Threads: everything on the thread that owns the engine, except where marked.
// Begins complete: made from a Place and what all ranks have told one another (Engine::createGroup).
// Ends: Sentinel::leave() tells mates and ranks of other nodes; its memory is given back when nobody can use it any
// more (tryGiveBack()).
// Errors: the first one breaks the group for good (Sentinel).
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/tuning.h"
#include "engine/calls/ended_operations.h"
#include "engine/health/sentinel.h"
#include "engine/observe/metrics.h"
#include "engine/observe/status_board.h"
#include "engine/operations/messages.h"
#include "engine/operations/operations.h"
#include "engine/plans/channels.h"
#include "engine/plans/plan_cache.h"
#include "engine/team/membership.h"
#include "engine/team/own_region.h"
#include "engine/team/team.h"

namespace smddp::engine::groups {

// Instead of settings, for one group only. The empty text leaves the setting in force.
struct GroupOptions {
  std::string algorithm;  // SMDDP_ALGORITHM
  std::string wire;       // SMDDP_WIRE
};

struct GroupSpec {
  std::string name;
  Rank me = 0;
  int size = 1;
  GroupOptions options = {};
  std::vector<Rank> jobRanks = {};  // by rank: its number in the job, for texts; empty: the same
  // Callbacks of futures make its calls. Its errors say so.
  bool ofCallbacks = false;
};

// The part of this rank in a group that is being made: its decisions, and the memory that it shares.
struct Place {
  // Refuses wrong settings, and not only in the first collective. Throws Usage, Resource.
  Place(process::Process& process, std::shared_ptr<const collectives::Tuning> tuning,
        GroupSpec spec);

  GroupSpec spec;
  std::shared_ptr<const collectives::Tuning> tuning;  // the rows of SMDDP_TUNING_FILE
  WireOption wire;
  plan::Limits limits;
  std::shared_ptr<team::OwnRegion> region;
  bootstrap::Introduction introduction;  // tells the other ranks what they must know
};

// The information that all ranks of a new group have exchanged, by rank.
struct Members {
  std::vector<bootstrap::Introduction> introductions;
  std::vector<std::string> nodeOfRank;  // ranks with equal names share a node

  // The number of the group, which is that of rank 0. Throws if another process has sent what is none.
  uint64_t groupId() const { return team::GroupEntry::decode(introductions.front()).groupId; }
};

class Group final {
 public:
  // Throws what keeps this rank from joining.
  Group(process::Process& process, const Place& place, const Members& members);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // True if a call keeps the rounding errors of its encodings (Request::residual). [any thread, after the last
  // PlanCache::useWire()]
  bool feedsBack(const calls::Request& request) const {
    return wire.feedback && plans.wireFor(request, request.bytes) != Wire::fp32;
  }
  // The introduction of a rank, as this process received it at their first meeting, with `group` as its entry for
  // another group.
  bootstrap::Introduction introductionOf(Rank rank, std::vector<std::byte> group) const;

  // Submits a message. In a broken group it ends at once. (Operations::submit() is for collectives.)
  void submit(calls::Message message, calls::CompletionPtr completion);
  // Does what can be done now; true when anything advanced. Never throws: an error breaks the group.
  bool advance();
  bool idle() const;
  // The completions of all that is in flight, except receives: other ranks may need this one for it.
  std::vector<calls::CompletionPtr> openExceptReceives();
  // True if an operation in flight needs the network or messages.
  bool needsPolling() const { return membership.spansNodes() || !messages.idle(); }
  void onControl(process::Peer& from, transport::Bytes message);

  // A signal has ended a wait of this rank: what is in flight ends on all ranks.
  void interrupt();
  bool wasInterrupted() const { return wasInterrupted_.load(); }  // [any thread]
  // The error with which an operation called now would end; null while all is well.
  const Error* errorOfNextOperation() const;
  // The error that broke the group, in the text for the user; also for messages, which have no number.
  std::optional<Error> breakAsUserError() const;
  // If no mate and no rank of another node can still touch the group's memory: marks it to be given back when the group
  // ends, releases what `ended` keeps, and returns true.
  bool tryGiveBack();
  // One line for the log: "group "0": rank 0 of 4, 2 nodes (2 + 2 ranks), 4 operations at a time; …".
  std::string describe() const;

 private:
  std::string describeWire() const;

  process::Process& process_;  // shutdown() of the engine destroys it
  std::atomic<bool> wasInterrupted_{false};
  const plan::Limits limits_;
  observe::StatusBoard::Slot status_;
  const std::shared_ptr<observe::Metrics::Group> metrics_;  // null: calls are not counted

 public:
  const GroupSpec spec;  // [any thread], as the next two
  const WireOption wire;
  const team::Membership membership;  // which ranks are in the group
  calls::EndedOperations ended;       // collects what operations leave behind
  team::Team team;                    // exchanges data with the ranks of this node in shared memory
  plans::Channels channels;           // carries what ranks send to one another
  plans::PlanCache plans;             // which algorithm a call uses; the plans
  team::CallHistory calls;  // the numbers of this rank's calls, and what the last of them were
  health::Sentinel
      sentinel;  // deadlines, ranks that are gone, breaks; knows the next two as Watched
  operations::Messages messages;      // sends and receives
  operations::Operations operations;  // collectives that wait or run
};

}  // namespace smddp::engine::groups
