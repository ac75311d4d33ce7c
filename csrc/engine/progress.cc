// Who runs the engine, and how its threads wait (engine.h).
#include <pthread.h>

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

#include "common/log.h"
#include "engine/engine.h"

namespace smddp::engine {
namespace {

// Callbacks that wait for other operations at the same time; no sane program has so many.
constexpr size_t kMaxThreads = 64;

}  // namespace

void Engine::post(std::function<void()> action) {
  {
    const std::lock_guard lock(inboxMutex_);
    inbox_.push_back(std::move(action));
    inboxSize_.store(inbox_.size());
  }
  process_->doorbell().ringSelf();
  // The owner may have let go between our look and the push: then somebody must take it up.
  if (tryOwn()) {
    drainInbox();
    release();
  }
}

void Engine::drainInbox() {
  while (inboxSize_.load(std::memory_order_acquire) > 0) {
    std::vector<std::function<void()>> actions;
    {
      const std::lock_guard lock(inboxMutex_);
      actions.swap(inbox_);
      inboxSize_.store(0);
    }
    for (const auto& action : actions) action();
    if (waiters_.load() > 0) {
      const std::lock_guard lock(waitMutex_);
      waitChanged_.notify_all();
    }
  }
}

void Engine::release() {
  const bool busy = !active_.empty();
  busy_.store(busy);
  owned_.store(false);
  if (waiters_.load() > 0) {
    const std::lock_guard lock(waitMutex_);
    waitChanged_.notify_all();
  } else {
    handOver();
  }
  if (!busy) policy_.ended();
  // What was posted while we let go has no other taker.
  if (inboxSize_.load() > 0 && tryOwn()) {
    guarded([this] {
      drainInbox();
      turn();
    });
    release();
  }
}

void Engine::waitUntil(const std::function<bool()>& done, Nanoseconds yieldFor) {
  policy_.returned();
  bool asked = false;
  while (!done()) {
    if (tryOwn()) {
      guarded([&] { runOwned(done, Waiter::Caller, yieldFor); });
      release();
      runContinuations();
      continue;
    }
    std::unique_lock lock(waitMutex_);
    waiters_.fetch_add(1);
    // A progress thread that sleeps as the owner lets go when it sees us.
    if (!std::exchange(asked, true)) process_->doorbell().ringSelf();
    waitChanged_.wait_for(lock, WaitPolicy::kWaiterPoll, [&] { return done() || !owned_.load(); });
    waiters_.fetch_sub(1);
  }
  handOver();
}

void Engine::leaveWait() {
  waiters_.fetch_sub(1);
  handOver();
}

void Engine::handOver() {
  if (!hasThreads_ || !busy_.load() || owned_.load() || waiters_.load() > 0) return;
  if (!policy_.leftInFlight()) return;
  const std::lock_guard lock(threadMutex_);
  threadChanged_.notify_one();
}

void Engine::activate(Group& group) {
  if (std::find(active_.begin(), active_.end(), &group) == active_.end()) active_.push_back(&group);
}

bool Engine::turn() {
  bool advanced = false;
  bool messages = false;
  for (size_t i = 0; i < active_.size(); ++i) {
    advanced |= active_[i]->advance();
    messages |= active_[i]->needsPolling();
  }
  if (messages && process_->poll() > 0) advanced = true;
  if (advanced) {
    collectContinuations();
    if (waiters_.load(std::memory_order_relaxed) > 0) {
      const std::lock_guard lock(waitMutex_);
      waitChanged_.notify_all();
    }
  }
  return advanced;
}

bool Engine::step() {
  if (!tryOwn()) return false;
  bool advanced = true;
  guarded([&] {
    drainInbox();
    process_->poll();
    advanced = turn();
    if (!advanced) look();
  });
  release();
  runContinuations();
  return advanced;
}

// The slow path's look at everything that can go wrong.
void Engine::look() {
  process_->poll();
  process_->checkPeers();
  for (size_t i = 0; i < active_.size(); ++i) active_[i]->checkHealth();
  for (auto& [id, group] : groups_) {
    if (group->isWatched() && group->checkMembers()) activate(*group);
  }
  collectContinuations();
}

void Engine::collectContinuations() {
  const auto take = [this](Group& group) {
    for (auto& action : group.takeContinuations()) continuations_.push_back(std::move(action));
  };
  for (Group* group : active_) take(*group);
  for (auto& group : remains_) take(*group);
  if (!continuations_.empty()) ended_.store(true);
  std::erase_if(active_, [](Group* group) { return group->idle(); });
}

void Engine::runOwned(const std::function<bool()>& done, Waiter waiter, Nanoseconds yieldFor) {
  WaitPolicy::Backoff backoff(policy_, waiter, yieldFor);
  while (true) {
    drainInbox();
    const bool advanced = turn();
    if (done() || !continuations_.empty()) return;
    // The progress thread lets go for a caller that waits, who pays no hand-over from then on.
    if (waiter == Waiter::ProgressThread && (waiters_.load() > 0 || mustBlock_.load())) return;
    if (advanced) {
      backoff.reset();
      continue;
    }
    if (backoff.spinOrYield()) continue;
    if (policy_.healthCheckDue()) {
      look();
      if (done() || !continuations_.empty()) return;
    }
    process_->doorbell().prepare();
    if (inboxSize_.load() > 0 || turn() || done()) {
      process_->doorbell().cancel();
      continue;
    }
    const bool network = std::any_of(active_.begin(), active_.end(),
                                     [](Group* group) { return group->spansNodes(); });
    process_->sleep(policy_.untilHealthCheck(), network);
  }
}

// Called without ownership. A continuation is the user's code: what it throws is its own business.
void Engine::runContinuations() {
  while (ended_.load() && tryOwn()) {
    std::vector<std::function<void()>> ready;
    ready.swap(continuations_);
    ended_.store(false);
    release();
    for (const auto& action : ready) {
      try {
        action();
      } catch (const std::exception& error) {
        SMDDP_LOG(Warn, "engine", "a callback of a finished operation threw: {}", error.what());
      }
    }
  }
}

// On a progress thread. A caller that came by might hold a lock, and wants to go on.
void Engine::runBlocking() {
  if (!mustBlock_.load()) return;
  std::vector<std::function<void()>> actions;
  {
    const std::lock_guard lock(threadMutex_);
    actions.swap(blocking_);
    mustBlock_.store(false);
  }
  keepOneIdle();
  for (const auto& action : actions) {
    try {
      action();
    } catch (const std::exception& error) {
      SMDDP_LOG(Warn, "engine", "what follows the failure of a group threw: {}", error.what());
    }
  }
}

// A continuation may wait for a future that only a progress thread can complete: another one stands by then.
void Engine::keepOneIdle() {
  const std::lock_guard lock(threadMutex_);
  if (stop_ || idle_ > 0) return;
  if (threads_.size() >= kMaxThreads) {
    SMDDP_LOG(Warn, "engine", "{} callbacks of finished operations are at work or wait",
              threads_.size());
    return;
  }
  try {
    threads_.emplace_back([this] { progressLoop(/*first=*/false); });
  } catch (const std::system_error& error) {
    SMDDP_LOG(Warn, "engine", "no thread for progress beside callbacks: {}", error.what());
  }
}

// Parks a progress thread until something is in flight that nobody waits for, or for kAnswerPeriod: while nothing is in
// flight here, ranks of other nodes may wait for us and ask what we are doing. False when it is time to end.
bool Engine::awaitWork() {
  const auto isLeft = [&] { return busy_.load() && waiters_.load() == 0 && !owned_.load(); };
  const auto answer = std::chrono::steady_clock::now() + WaitPolicy::kAnswerPeriod;
  std::unique_lock lock(threadMutex_);
  ++idle_;
  while (!stop_ && blocking_.empty() && std::chrono::steady_clock::now() < answer) {
    // Said before we look for work: what is left at this moment is seen by us, or by who leaves it (handOver).
    const bool polls = policy_.beginPoll();
    if (isLeft() && policy_.takesWork(polls)) break;
    threadChanged_.wait_until(
        lock, polls ? std::chrono::steady_clock::now() + WaitPolicy::kParkedPoll : answer);
  }
  policy_.endPoll();
  --idle_;
  return !stop_;
}

void Engine::progressLoop(bool first) {
  pthread_setname_np(pthread_self(), "smddp-progress");
  std::optional<transport::shm::Lifeline> lifeline;
  if (first) lifeline.emplace(process_->sharedSlab());
  while (awaitWork()) {
    runBlocking();
    if (!tryOwn()) continue;
    guarded([this] {
      if (process_->onFabric() || watches_) look();
      runOwned([this] { return active_.empty(); }, Waiter::ProgressThread);
    });
    if (!continuations_.empty()) keepOneIdle();
    release();
    runContinuations();
  }
}

}  // namespace smddp::engine
