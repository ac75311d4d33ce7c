// A communicator: the ranks of one c10d process group, and the operations they have in flight.
//
// Operations run in the order submitted; execution n runs on track n % tracks, and begins when that track is
// free. At its arrival the ranks of a node read one another's descriptions of the call and all take the same
// branch: mismatch, staged or zero-copy, how many waiting requests are fused.
//
// Threads: everything on the thread that owns the engine, except where marked.
// Ends: leave() tells mates and peers; its memory is given back when nobody can use it any more (Remains).
// Errors: the first one breaks the group for good, from the operation that met it on: that one and all behind it
// end with the error, on every rank, now or when they are called. Operations before it run on: whoever is done
// with them may have left for good, and others still take in what it sent.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bootstrap/rendezvous.h"
#include "engine/blame.h"
#include "engine/completion.h"
#include "engine/executor.h"
#include "engine/matcher.h"
#include "engine/plan_cache.h"
#include "engine/process.h"
#include "engine/region.h"
#include "engine/region_pool.h"
#include "engine/request.h"
#include "engine/team_bell.h"
#include "engine/track.h"
#include "engine/window_pool.h"

namespace smddp::engine {

class Group final : private Matcher::Host {
 public:
  struct Spec {
    std::string name;
    Rank me = 0;
    int size = 1;
    std::string algorithm = {};  // instead of SMDDP_ALGORITHM, for this group only
  };

  // Two halves, so that something else than a store can stand between them (the simulator's tests):
  // what this rank publishes, then what everybody published and who shares a node.
  Group(Process& process, Spec spec);
  std::vector<std::byte> publish();
  void join(const std::vector<bootstrap::Introduction>& introductions,
            const std::vector<std::string>& nodeOfRank);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const Spec& spec() const { return spec_; }
  uint64_t id() const { return id_; }
  const plan::Topology& topology() const { return *topology_; }
  // What a rank said of itself when it was met, with `group` as what concerns a group.
  bootstrap::Introduction introductionOf(Rank rank, std::vector<std::byte> group) const;
  bool spansNodes() const { return topology_->numNodes() > 1; }

  void submit(Request request, CompletionPtr completion);
  void submit(Message message, CompletionPtr completion);
  // The same for a caller who waits, while nothing is in flight: a small vector that all ranks reduce at about the same
  // time never becomes an operation in flight. Returns false where it is not such a call: it is to be submitted. If true
  // and it has not ended, it is in flight.
  bool runAtOnce(Request& request, const CompletionPtr& completion);
  bool runAtOnce(Message&, const CompletionPtr&) { return false; }
  // Takes back a receive that nobody has sent for yet: it ends without being heard of again.
  bool withdraw(const Completion& receive) { return matcher_->withdraw(receive); }
  // Does what can be done now; true when anything advanced. Never throws: trouble breaks the group.
  bool advance();
  bool idle() const;
  // Whether anything in flight involves the network or messages.
  bool needsPolling() const { return spansNodes() || !matcher_->idle(); }
  // The slow path's look at deadlines, peers and mates.
  void checkHealth();
  void onControl(Peer& from, transport::Bytes message);
  // Breaks the group because somebody will not wait for this operation any longer, unless it has ended.
  void expire(const Completion& completion, Nanoseconds waited);
  // Breaks the group from the oldest operation in flight on.
  void fail(const Error& cause);
  // The ranks wait for one another elsewhere, too: from now on one that dies breaks the group, awaited or not. `action`
  // runs with the first error that breaks it, as a continuation, unless this rank leaves before.
  void watch(std::function<void(const Error&)> action);
  bool isWatched() const { return watched_; }
  // The look at a watched group, also while it is idle; true when it has been broken.
  bool checkMembers();
  // What an operation called now would end with; null while all is well.
  const Error* error() const {
    return broken_ && broken_->from <= sequence_ + 1 ? &broken_->cause : nullptr;
  }
  // The same for what has no place in the order of operations.
  std::optional<Error> failure() const;
  // Operations that ended since the last call: their continuations are to be run.
  std::vector<std::function<void()>> takeContinuations() { return std::exchange(ended_, {}); }
  // No operation follows: mates need not wait for us, peers are told.
  void leave();
  // Whether no mate and no peer can still touch the group's memory.
  bool abandoned();

  // By collective and algorithm: "allreduce/direct".
  std::map<std::string, AlgorithmUse> statistics() const { return plans_->statistics(); }
  // "2 nodes x 2 ranks, …": one line for the log.
  std::string describe() const;

 private:
  struct Member {
    Peer* peer = nullptr;            // null for this rank
    RegionHeader* region = nullptr;  // of mates, and mine
    uint64_t regionGroup = 0;        // RegionHeader::group of a mate, until it gives the region up
  };
  struct Operation {
    Request request;
    CompletionPtr completion;
    Deadline deadline;
    uint64_t sequence = 0;
    transport::CallFingerprint call;
  };
  enum class Phase { Idle, Arriving, Preamble, Running };
  // What runs on a track.
  struct Active {
    Track track;
    std::unique_ptr<Executor> executor;
    Phase phase = Phase::Idle;
    std::vector<Operation> operations;  // several when fused
    collectives::Shape shape;           // of all of them together
    Pieces input, output;
    const PlanCache::Entry* plan = nullptr;
    std::array<size_t, 2> committed{};  // bytes of each staging half that have backing
    std::array<size_t, 2> sources{};    // and that the network knows as sources
    // The wait that checkHealth() watches.
    struct Watch {
      uint64_t sequence = 0;
      Nanoseconds since = 0;
      Nanoseconds askedAt = 0;
      bool reported = false;
    } watch;
  };
  struct Break {
    uint64_t from;
    Error cause;
  };
  enum class Cause { Mine, Heard };

  bool advanceOperations();
  bool advanceTrack(Active& active);
  void startNext(Active& active);
  void takeFusable(std::vector<Operation>& taken);
  bool copiesAlike(int64_t one, int64_t several);
  Arrival& publishArrival(Active& active, const transport::CallFingerprint& call, uint32_t ready,
                          bool shared, bool isNear);
  bool allArrived(const Active& active) const;
  void agree(Active& active);
  void run(Active& active, bool arrived);
  Binding& bind(Active& active, const Request& request, const transport::CallFingerprint& call,
                uint64_t sequence) const;
  void bind(Active& active);
  void gather(Active& active);
  bool myBuffersShared(const Active& active, Arrival& mine) const;
  void ensureChannels(Active& active, const plan::Plan& plan);
  void commitStaging(Active& active, const CachedPlan& plan);
  void finishTrack(Active& active);
  void count(const PlanCache::Entry& entry, uint64_t calls, int64_t bytes);
  uint64_t begin(Completion& completion);
  bool allCall(const Active& active, const transport::CallFingerprint& call) const;
  void end(Completion& completion, std::optional<Error> error);
  // Runs `step`; what it throws breaks the group from operation `from` on. True: something changed.
  template <typename Step>
  bool attempt(uint64_t from, Step step);
  uint64_t oldestInFlight() const;
  void breakFrom(uint64_t from, const Error& cause, Cause whose);
  void endBroken();
  void publishBreak();
  bool hearMates();
  Error errorFor(const transport::CallFingerprint& call, uint64_t sequence) const;
  Error lateError(const Active& active, Nanoseconds waited) const;
  Error lateError(const Exchange& exchange, Nanoseconds waited) const;
  std::string culprit(
      const Blame& blame) const;        // "; rank 3 (…) has not made this call yet", or nothing
  std::string nameOf(Rank rank) const;  // "rank 3 (pid 40122 on ip-10-0-1-7)"
  Standstill standstillOf(const Active& active) const;
  std::set<Rank> messagesAwait() const;
  void watch(Active& active, const Standstill& at);
  void inquire(const std::set<Rank>& awaited, uint64_t sequence,
               const transport::CallFingerprint& call);
  Blame blameFor(const std::set<Rank>& awaited, uint64_t sequence) const;
  Blame blameOn(Rank rank, uint64_t sequence) const;
  bool isLost(Rank rank) const;
  Error goneError(Rank rank) const;
  bool breakIfLost(const std::set<Rank>& awaited, uint64_t sequence);
  void checkLost();
  void checkDeadlines();
  void onInquiry(Rank from, const InquiryMessage& inquiry);
  void requireSameCall(Rank rank, const transport::CallFingerprint& theirs,
                       const transport::CallFingerprint& mine) const;

  // Matcher::Host.
  void sendControl(Rank peer, transport::Bytes message) override;
  transport::SendChannel& sendChannel(Rank peer) override;
  transport::ReceiveChannel& receiveChannel(Rank peer) override;
  void finish(Exchange& exchange) override;
  bool backlogged(Rank peer) override;

  transport::ReceiveChannel& openReceive(Rank peer, uint8_t track, uint8_t stream,
                                         int64_t messageBytes);
  transport::ChannelKey key(Rank source, Rank destination, uint8_t track, uint8_t stream) const {
    return {id_, track, stream, source, destination};
  }

  Process& process_;  // gone when the engine has been shut down; the slab outlives the group
  const std::shared_ptr<RegionPool> regions_;
  const std::shared_ptr<WindowPool> windows_;
  const Spec spec_;
  TeamBell bell_;
  plan::Limits limits_;
  RegionLayout layout_;
  std::span<std::byte> region_;
  uint64_t id_ = 0;
  std::optional<plan::Topology> topology_;
  std::vector<Member> members_;  // by group rank
  std::string self_;             // this process, as Peer::describe() calls others
  std::unique_ptr<PlanCache> plans_;
  std::unique_ptr<Matcher> matcher_;
  std::vector<std::unique_ptr<Active>> tracks_;
  std::deque<Operation> pending_;
  uint64_t started_ = 0;   // executions
  uint64_t sequence_ = 0;  // collectives submitted
  // What they were, by sequence; and what ranks of other nodes wait in that we have yet to call.
  struct Told {
    uint64_t sequence;
    transport::CallFingerprint call;
  };
  std::array<transport::CallFingerprint, 64> calls_{};
  std::map<Rank, Told> told_;
  std::map<Rank, transport::ReceiveChannel*> messageChannels_;
  struct Window {
    std::span<std::byte> memory;
    const Peer* from;
  };
  std::vector<Window> taken_;  // from windows_
  std::optional<Break> broken_;
  bool watched_ = false;
  std::vector<std::function<void(const Error&)>> watchers_;  // until the group is broken
  std::vector<uint32_t> heard_;  // by rank: how many BreakRecords of a mate were read
  Inquiries inquiries_;
  Nanoseconds messagesAskedAt_ = 0;
  // After an error the network must be polled for a while, or the others might not hear of it.
  Deadline spreadingUntil_{0};
  bool left_ = false;
  bool abandoned_ = false;
  // What a broken group's network may still read or write.
  std::vector<std::shared_ptr<void>> inFlight_;
  std::vector<std::function<void()>> ended_;
};

template <typename Step>
bool Group::attempt(uint64_t from, Step step) {
  try {
    return step();
  } catch (const Error& error) {
    breakFrom(from, error, Cause::Mine);
  } catch (const std::exception& error) {
    breakFrom(from, Error(ErrorKind::Internal, error.what()), Cause::Mine);
  }
  return true;
}

}  // namespace smddp::engine
