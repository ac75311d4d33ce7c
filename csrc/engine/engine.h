// The engine of a process: makes groups, takes operations, and waits for them.
//
// Its functions concern a group and how calls of it are run. The parts of a group do its work (group.h); Progress
// decides which thread runs them.
//
// Threads: all public functions from any thread. Callers, the progress thread and continuations take turns as the
// engine's owner: docs/threads.md.
// Ends: shutdown() (or the destructor) leaves all groups and joins the threads. After fork() the child's copy refuses
// every call.
// Errors: an operation's error is in its Completion. These functions throw Usage errors; createGroup() also throws the
// errors of making a group.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "bootstrap/store.h"
#include "common/ownership.h"
#include "engine/groups/group.h"
#include "engine/groups/group_registry.h"
#include "engine/groups/meeting.h"
#include "engine/observe/metrics_writer.h"
#include "engine/process/process.h"
#include "engine/progress/fork_hold.h"
#include "engine/progress/progress.h"

namespace smddp::engine {

class Engine {
 public:
  struct Options {
    process::Process::Options process;
    // Without it the engine runs only in Progress::runTurn() and in callers that wait: for the simulator's tests.
    bool progressThread = true;
  };
  explicit Engine(const Options& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Settings settings;  // [any thread]

  // A group in which this process has met the members of a new group before: `parent` has all of them, and `ranks` are
  // their numbers in `parent`, in the order of the new group.
  struct KnownMembers {
    std::shared_ptr<groups::Group> parent;
    std::vector<Rank> ranks;
  };
  // Meets the other ranks. Returns a complete group, or throws why there is none: Usage, Resource, Timeout, Mismatch,
  // Transport; PeerLost if a member is lost. Then the other ranks know that this one is not in the group.
  std::shared_ptr<groups::Group> createGroup(const groups::GroupSpec& spec,
                                             groups::Meeting& meeting);
  // Meets them in the store.
  std::shared_ptr<groups::Group> createGroup(bootstrap::Store& store, const groups::GroupSpec& spec,
                                             Nanoseconds timeout, const KnownMembers& known = {});
  // The two halves of createGroup(), for callers that bring the introductions from rank to rank themselves.
  groups::Place reserve(const groups::GroupSpec& spec);
  std::shared_ptr<groups::Group> join(const groups::Place& place, const groups::Members& members);
  // Called before this rank leaves. Waits until everything in flight except receives has ended, well or not, because
  // other ranks may need this one for it. Waits for `others`, too. Each operation has its deadline.
  void waitForOpenCalls(groups::Group& group, const std::vector<calls::CompletionPtr>& others = {});
  // Idempotent. Operations in flight end with Aborted, on all ranks; the error says that this rank `how`.
  void destroyGroup(const std::shared_ptr<groups::Group>& group,
                    const char* how = "left the group");

  // Takes an operation. With Request::willWait it returns when the operation has ended, well or not; else at once.
  calls::CompletionPtr submit(groups::Group& group, calls::Request request);
  calls::CompletionPtr submit(groups::Group& group, calls::Message message);
  // submit() and wait() in one. Throws the operation's error.
  void run(groups::Group& group, calls::Request request);
  // Submits an operation, and runs nothing: for threads that must not run continuations. The group has to live until
  // the operation has ended.
  void enqueue(groups::Group& group, calls::Request request, calls::CompletionPtr completion);
  void enqueue(groups::Group& group, calls::Message message, calls::CompletionPtr completion);
  // Waits until the operation has ended, well or not; its own deadline ends it at the latest. An exception of
  // checkInterrupt() passes through this function and the next two. Then the group breaks with Aborted on all ranks,
  // since they wait for this one.
  void wait(groups::Group& group, const calls::Completion& completion);
  // Waits as wait() does, but at most this long; false when the time is over.
  bool waitFor(groups::Group& group, const calls::Completion& completion, Nanoseconds timeout);
  // Waits until one of them has ended, or until a thread has set `interrupted` and called Progress::wakeWaiters().
  // Yields for `yieldFor` before it sleeps, instead of a fixed number of times.
  void waitForAny(groups::Group& group, const std::vector<calls::CompletionPtr>& completions,
                  const std::atomic<bool>& interrupted, Nanoseconds yieldFor);
  // Takes back receives for which nobody has sent anything yet. Returns those that cannot be taken back.
  std::vector<calls::CompletionPtr> withdraw(groups::Group& group,
                                             std::vector<calls::CompletionPtr> receives);
  // A caller has waited for so long for an operation, and waits no longer: ends everything in flight on the group, on
  // all ranks, as the operation's own deadline does.
  void expire(groups::Group& group, const calls::Completion& completion, Nanoseconds waited);
  // Ends everything in flight on the group, on all ranks.
  void fail(groups::Group& group, const Error& error);
  // `action` runs once, with the first error that breaks the group, unless this rank leaves it before. It runs on a
  // progress thread while another one stands by: it may block, and may run until shutdown(), also after destroyGroup():
  // it has to own what it touches.
  void onBreak(groups::Group& group, std::function<void(const Error&)> action);
  // From now on the death of a member breaks the group within 0.25 s, although nobody here waits for it. For groups
  // whose ranks also wait for one another outside the engine, as in NCCL.
  void watchMembers(groups::Group& group);
  // The error that has broken the group, as a sentence for the user.
  std::optional<Error> failureOf(const groups::Group& group);
  // Keeps memory of an operation that has failed until no mate and no rank of another node can touch it any more.
  void keep(groups::Group& group, std::shared_ptr<void> memory);
  // Throws Usage after shutdown(), and in a child of fork().
  void requireUsable() const;
  // Communication memory. Throws as requireUsable().
  std::shared_ptr<transport::shm::CommMemory> tensorMemory() const;
  // True in a child of fork() whose parent had left all groups: the child may make an engine of its own. It must keep
  // this one.
  bool isReplaceableInChild() const;
  // See GroupRegistry. Call it on the engine's owner.
  std::vector<groups::GroupRegistry::Note> takeNotes(uint64_t mailbox) {
    return groups_.takeNotes(mailbox);
  }
  // Runs actions on the owner that are not calls of a group.
  progress::Progress& progress() { return progress_; }
  // Throws as requireUsable(). Call it on the engine's owner: shutdown() ends the process there.
  process::Process& process() {
    requireUsable();
    return *process_;
  }
  // Waits for what is in flight, for at most 2 s; leaves all groups; waits until peers have what we sent, again for at
  // most 2 s; joins the threads. Idempotent.
  void shutdown();

 private:
  // Neither shut down nor the copy in a child of a fork.
  bool isUsable() const { return !isShutDown_.load() && forkCount_ == progress::forkCount(); }
  // Waits on behalf of a caller of the group.
  void waitUntil(groups::Group& group, const std::function<bool()>& done, Nanoseconds yieldFor = 0);
  // Runs `action`, which may end operations of the group or leave something in flight.
  void callOn(groups::Group& group, const std::function<void()>& action);
  template <typename Operation>
  calls::CompletionPtr submitAny(groups::Group& group, Operation operation);
  template <typename Operation>
  void post(groups::Group& group, Operation operation, calls::CompletionPtr completion);

  const uint32_t forkCount_;
  Ownership ownership_;
  std::atomic<bool> isShuttingDown_{false};
  std::atomic<bool> isShutDown_{false};  // process_ is null
  std::unique_ptr<process::Process> process_;
  std::shared_ptr<const collectives::Tuning> tuning_;  // null until the first group is made
  const std::weak_ptr<transport::shm::CommMemory> tensorMemory_;
  groups::GroupRegistry groups_;
  progress::Progress progress_;
  std::optional<progress::ForkHold> forkHold_;
  std::optional<observe::MetricsWriter> metricsWriter_;  // if SMDDP_METRICS is set
};

}  // namespace smddp::engine
