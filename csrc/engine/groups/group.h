// A communicator: the ranks of one c10d process group, and the operations they have in flight.
//
// A façade. What a group does is in its parts, each of which uses only those above it in this list:
//
//   Membership   which ranks are in the group, as a value
//   Team         what the ranks of this node tell one another in shared memory
//   Channels     what ranks send to one another
//   PlanCache    which algorithm a call uses; the plans
//   CallHistory  the numbers of this rank's calls, and what the last of them were
//   Sentinel     deadlines, ranks that are gone, breaks, leaving; knows the next two only as Watched
//   Operations   collectives that wait or run
//   Messages     sends and receives
//
// Threads: everything on the thread that owns the engine, except where marked.
// Ends: leave() tells mates and ranks of other nodes; its memory is given back when nobody can use it any more
// (tryGiveBack()).
// Errors: the first one breaks the group for good (Sentinel).
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/calls/ended_operations.h"
#include "engine/health/sentinel.h"
#include "engine/observe/metrics.h"
#include "engine/observe/status_board.h"
#include "engine/operations/messages.h"
#include "engine/operations/operations.h"
#include "engine/plans/channels.h"
#include "engine/plans/plan_cache.h"
#include "engine/team/membership.h"
#include "engine/team/team.h"

namespace smddp::engine::groups {

// Instead of settings, for one group only. The empty text leaves the setting in force.
struct GroupOptions {
  std::string algorithm;  // SMDDP_ALGORITHM
  std::string wire;       // SMDDP_WIRE
};

class Group final {
 public:
  struct Spec {
    std::string name;
    Rank me = 0;
    int size = 1;
    GroupOptions options = {};
    std::vector<Rank> jobRanks = {};  // by rank: its number in the job, for texts; empty: the same
    // Callbacks of futures make its calls. Its errors say so.
    bool ofCallbacks = false;
  };

  // A group is made in two halves: makeEntry() returns what this rank publishes, join() takes what all ranks have
  // published and which of them share a node. The caller brings the entries from rank to rank: through a store, in
  // messages (split.h), or as the simulator's tests do.
  Group(process::Process& process, Spec spec);
  std::vector<std::byte> makeEntry();
  void join(const std::vector<bootstrap::Introduction>& introductions,
            const std::vector<std::string>& nodeOfRank);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const Spec& spec() const { return spec_; }
  uint64_t id() const { return membership_->group; }
  const plan::Topology& topology() const { return membership_->topology; }
  // See Membership. [any thread]
  Rank jobRank(Rank rank) const { return membership_->jobRank(rank); }
  bool spansNodes() const { return membership_->spansNodes(); }
  // What the group was made with. [any thread]
  const WireOption& wire() const { return wire_; }
  // The format from the next call on, for "auto". The same call on all ranks comes next.
  void useWire(Wire wire) { plans_->useWire(wire); }
  // See PlanCache.
  std::optional<std::string> whyOnlyFp32() const { return plans_->whyOnlyFp32(); }
  // Whether a call keeps what its encodings lose (Request::residual). [any thread, after the last useWire()]
  bool feedsBack(const calls::Request& request) const {
    return wire_.feedback && plans_->wireFor(request, request.bytes) != Wire::fp32;
  }
  // What a rank said of itself when this process met it, with `group` as its entry for another group.
  bootstrap::Introduction introductionOf(Rank rank, std::vector<std::byte> group) const;

  void submit(calls::Request request, calls::CompletionPtr completion);
  void submit(calls::Message message, calls::CompletionPtr completion);
  // See Operations.
  bool runOneShot(calls::Request& request, const calls::CompletionPtr& completion) {
    return operations_->runOneShot(request, completion);
  }
  // Takes back a receive for which nobody has sent anything yet. Its completion never ends. False if it has a sender,
  // or has ended.
  bool withdraw(const calls::Completion& receive) { return messages_->withdraw(receive); }
  // Does what can be done now; true when anything advanced. Never throws: an error breaks the group.
  bool advance();
  bool idle() const;
  // The completions of all that is in flight, except receives: other ranks may need this one for it.
  std::vector<calls::CompletionPtr> openExceptReceives();
  // Whether anything in flight involves the network or messages.
  bool needsPolling() const { return spansNodes() || !messages_->idle(); }
  void onControl(process::Peer& from, transport::Bytes message);

  // See Sentinel.
  void checkHealth() { sentinel_->checkHealth(); }
  void expire(const calls::Completion& completion, Nanoseconds waited) {
    sentinel_->expire(completion, waited);
  }
  void fail(const Error& cause) { sentinel_->fail(cause); }
  void tellOfTrouble(const std::string& text) { sentinel_->tellOfTrouble(text); }
  // A signal has ended a wait of this rank: what is in flight ends on all ranks.
  void interrupt();
  bool wasInterrupted() const { return wasInterrupted_.load(); }  // [any thread]
  // For a caller that waits for the store to have the entry of `rank`. Returns how the rank was lost, if it was. If
  // not, probes its host, so that a host that does not answer is found.
  std::optional<Error> howLost(Rank rank) { return sentinel_->howLost(rank); }
  bool hasDied(Rank rank) const {
    const process::Peer* peer = membership_->peers[rank];
    return peer != nullptr && peer->died;
  }
  void onBreak(std::function<void(const Error&)> action) { sentinel_->onBreak(std::move(action)); }
  void watchMembers() { sentinel_->watchMembers(); }
  bool checkMembers() { return sentinel_->checkMembers(); }
  // What an operation called now would end with; null while all is well.
  const Error* errorOfNextOperation() const;
  // The error that broke the group, in the text for the user; also for messages, which have no number.
  std::optional<Error> breakAsUserError() const;

  // Appends what operations that have ended since the last call leave behind.
  void moveLeftoversTo(calls::Leftovers& leftovers) { ended_.moveTo(leftovers); }
  // Nothing is in flight any more: this rank waits for nobody.
  void rest() { team_.clearBlame(); }
  // Keeps memory of an operation that has failed for as long as the group lives.
  void keep(std::shared_ptr<void> memory) { ended_.keep(std::move(memory)); }
  // This rank makes no more calls: tells mates and ranks of other nodes.
  void leave() { sentinel_->leave(idle()); }
  // See Sentinel.
  std::vector<std::byte> farewell() const { return sentinel_->farewell(); }
  // If no mate and no rank of another node can still touch the group's memory: marks it to be given back when the group
  // ends, releases what keep() was given, and returns true.
  bool tryGiveBack();

  // By collective and algorithm: "allreduce/direct".
  std::map<std::string, plans::AlgorithmUse> statistics() const { return plans_->statistics(); }
  // One line for the log: "group "0": rank 0 of 4, 2 nodes (2 + 2 ranks), 4 operations at a time; …".
  std::string describe() const;

 private:
  void joinAll(const std::vector<bootstrap::Introduction>& introductions,
               const std::vector<team::GroupEntry>& entries,
               const std::vector<std::string>& nodeOfRank);
  std::string describeWire() const;

  process::Process& process_;  // shutdown() of the engine destroys it
  const Spec spec_;
  const WireOption wire_;
  std::atomic<bool> wasInterrupted_{false};
  const plan::Limits limits_;
  calls::EndedOperations ended_;
  team::Team team_;
  observe::StatusBoard::Slot status_;
  const std::shared_ptr<observe::Metrics::Group> metrics_;  // null: calls are not counted
  // Since join().
  std::optional<const team::Membership> membership_;
  std::optional<plans::Channels> channels_;
  std::optional<plans::PlanCache> plans_;
  std::optional<team::CallHistory> calls_;
  std::optional<health::Sentinel> sentinel_;
  std::optional<operations::Messages> messages_;
  std::optional<operations::Operations> operations_;
};

}  // namespace smddp::engine::groups
