// Runs the operations of all groups of a process. Whoever holds the engine's ownership runs it.
//
// A caller that will wait anyway takes ownership and runs the executor itself until its operation is done: no
// hand-over is paid. An asynchronous submitter takes the first steps; what is left goes to the one progress thread,
// which is parked while a caller owns the engine or is about to return (return_predictor.h), and while nothing is in
// flight.
// Somebody who finds the engine owned leaves his request in the inbox, which the owner empties at every turn.
//
// How threads wait is decided in wait_policy.h.
//
// Threads: all public functions from any thread. Continuations run without ownership, on the thread that completed
// the operation; they may submit and wait, also for futures, which drives nothing: so a progress thread has another one
// stand by before it runs any.
// Ends: shutdown() (or the destructor) leaves all groups and joins the threads. After fork() the child's copy
// refuses every call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "bootstrap/store.h"
#include "engine/group.h"
#include "engine/process.h"
#include "engine/wait_policy.h"

namespace smddp::engine {

class Engine {
 public:
  struct Options {
    Process::Options process;
    // Without it nothing runs but in step() and in callers that wait: the simulator's tests.
    bool progressThread = true;
  };
  explicit Engine(Options options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Meets the other ranks in the store. Throws Timeout, Mismatch, Transport, Resource.
  std::shared_ptr<Group> createGroup(bootstrap::Store& store, const Group::Spec& spec,
                                     Nanoseconds timeout);
  // The same in two halves around an exchange done elsewhere.
  std::pair<std::shared_ptr<Group>, bootstrap::Introduction> beginGroup(const Group::Spec& spec);
  void finishGroup(const std::shared_ptr<Group>& group,
                   const std::vector<bootstrap::Introduction>& introductions,
                   const std::vector<std::string>& nodeOfRank);
  // A group of some of `parent`'s ranks, who know one another already: no store, one small message from each to the
  // first of them and back. `members` are ranks of the parent; all of them call this in the same order.
  std::shared_ptr<Group> splitGroup(const std::shared_ptr<Group>& parent, const Group::Spec& spec,
                                    const std::vector<Rank>& members, Nanoseconds timeout);
  // Idempotent. Operations in flight end with Aborted.
  void destroyGroup(const std::shared_ptr<Group>& group);

  CompletionPtr submit(Group& group, Request request);
  CompletionPtr submit(Group& group, Message message);
  // The same without running anything: for threads that must not run continuations. The group has to live until
  // the completion has ended.
  void enqueue(Group& group, Request request, CompletionPtr completion);
  void enqueue(Group& group, Message message, CompletionPtr completion);
  // Until the operation has ended, well or not; its deadline is the operation's own.
  void wait(const Completion& completion);
  // The same, but at most this long; false when the time is over.
  bool waitFor(const Completion& completion, Nanoseconds timeout);
  // Until one of them has ended, or somebody has set `enough` and called wakeWaiters(). Yields for `yieldFor` before it
  // sleeps, instead of a fixed number of times.
  void waitForAny(const std::vector<CompletionPtr>& completions, const std::atomic<bool>& enough,
                  Nanoseconds yieldFor);
  // Takes back receives for which nobody has sent anything yet. Returns those that cannot be taken back.
  std::vector<CompletionPtr> withdraw(Group& group, std::vector<CompletionPtr> receives);
  // Those who wait look again at what they wait for.
  void wakeWaiters();
  // A caller has waited this long for an operation and will not any longer: ends everything in flight on the
  // group, on all ranks, as the operation's own deadline does.
  void expire(Group& group, const Completion& completion, Nanoseconds waited);
  // Ends everything in flight on the group, on all ranks.
  void abort(Group& group, const std::string& reason);
  // The same with an error that somebody above the engine has found.
  void fail(Group& group, const Error& error);
  // For ranks that wait for one another elsewhere, too, such as in NCCL: from now on one that dies breaks the group
  // although nobody waits for it here; that is noticed within 0.25 s. `action` runs once, with the first error that
  // breaks the group, unless this rank leaves it before. It runs on a progress thread while another one stands by: it
  // may block, and may run until shutdown(), also after destroyGroup(): it has to own what it touches.
  void watch(Group& group, std::function<void(const Error&)> action);
  // What has broken the group, as a sentence for the user.
  std::optional<Error> failureOf(const Group& group);
  // Ends an operation that was made of several, as seen by those who wait for it.
  void finish(Completion& completion, std::optional<Error> error);
  // Throws Usage after shutdown(), and in a child of fork().
  void requireUsable() const;
  // Runs `action` on the engine's owner and returns when it has run. Exceptions pass through.
  void call(const std::function<void()>& action);

  // One turn, for engines without a thread. True when anything advanced.
  bool step();

  // A thread that waits for several things, one look after the other. As long as it says so it counts as a waiter:
  // to wake the progress thread after each look would only make it a rival.
  class Attendance {
   public:
    explicit Attendance(Engine& engine) : engine_(engine) { engine_.waiters_.fetch_add(1); }
    ~Attendance() { engine_.leaveWait(); }
    Attendance(const Attendance&) = delete;
    Attendance& operator=(const Attendance&) = delete;

   private:
    Engine& engine_;
  };

  Process& process() { return *process_; }
  // Around a fork, on the thread that forks. The first holds the engine still, so that the child finds its
  // connections in order; one of the others ends that. The child must not keep the connections open.
  void beforeFork();
  void afterForkInParent();
  void afterForkInChild() noexcept;
  // Leaves all groups, waits a moment for peers to have what we sent, joins the thread. Idempotent.
  void shutdown();

 private:
  struct ForkPause;
  using Waiter = WaitPolicy::Waiter;

  bool tryOwn() {
    return !owned_.load(std::memory_order_relaxed) &&
           !owned_.exchange(true, std::memory_order_acquire);
  }
  void release();
  void post(std::function<void()> action);
  void drainInbox();
  bool turn();
  // Runs until `done` or until there is something the owner must give up ownership for.
  void runOwned(const std::function<bool()>& done, Waiter waiter, Nanoseconds yieldFor = 0);
  void waitUntil(const std::function<bool()>& done, Nanoseconds yieldFor = 0);
  void leaveWait();
  // What is left in flight goes to the progress thread, unless somebody waits or is about to.
  void handOver();
  void collectContinuations();
  void runContinuations();
  void runBlocking();
  void look();
  void breakOff(Group& group, const std::function<void()>& failing);
  void progressLoop(bool first);
  bool awaitWork();
  void keepOneIdle();
  void failActive(const std::string& text, ErrorKind kind);
  // With ownership. What `action` throws ends what is in flight, and the caller goes on to release().
  template <typename Action>
  void guarded(const Action& action);
  void activate(Group& group);
  void dispatch(Peer& from, transport::Bytes message);
  void reap();
  void awaitLifelines(Nanoseconds timeout);
  template <typename Operation>
  CompletionPtr submitAny(Group& group, Operation operation);
  template <typename Operation>
  void postOperation(Group& group, Operation operation, CompletionPtr completion);

  const uint32_t forkGeneration_;
  const bool hasThreads_;
  // While somebody forks: how the engine is held still. Guarded by the lock of all forks.
  bool ownedForFork_ = false;
  std::shared_ptr<ForkPause> pausedForFork_;
  std::unique_ptr<Process> process_;
  WaitPolicy policy_;
  std::atomic<bool> owned_{false};

  // Owner only.
  std::map<uint64_t, std::shared_ptr<Group>> groups_;  // by id
  std::vector<Group*> active_;                         // groups with something in flight
  std::vector<std::shared_ptr<Group>> remains_;        // left, memory still in use by others
  std::vector<std::function<void()>> continuations_;
  std::atomic<bool> ended_{false};  // continuations_ has some
  bool watches_ = false;            // some group, since it was made or before
  struct Stashed {
    Peer* from;
    std::vector<std::byte> message;
  };
  std::map<uint64_t, std::deque<Stashed>> stash_;  // for groups that this rank has not made yet
  uint64_t nodeAgreement_ = 0;

  std::mutex inboxMutex_;
  std::vector<std::function<void()>> inbox_;  // guarded by inboxMutex_
  std::atomic<size_t> inboxSize_{0};

  // Those who wait for the owner to finish something or to let go.
  std::mutex waitMutex_;
  std::condition_variable waitChanged_;
  std::atomic<int> waiters_{0};

  std::mutex threadMutex_;
  std::condition_variable threadChanged_;
  std::atomic<bool> busy_{false};  // something is in flight
  bool stop_ = false;              // guarded by threadMutex_
  bool shutDown_ = false;          // owner only
  int idle_ = 0;                   // guarded by threadMutex_: threads that wait for work
  // What is to be done on a progress thread because it may block; guarded by threadMutex_.
  std::vector<std::function<void()>> blocking_;
  std::atomic<bool> mustBlock_{false};  // blocking_ has some
  std::vector<std::thread> threads_;    // guarded by threadMutex_; the first holds the lifeline
};

// An owner that threw past release() would leave everybody waiting for ever.
template <typename Action>
void Engine::guarded(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    failActive(error.what(), error.kind());
  } catch (const std::exception& error) {
    failActive(error.what(), ErrorKind::Internal);
  }
}

}  // namespace smddp::engine
