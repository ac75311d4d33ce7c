// Who runs the engine, and how its threads wait (engine.h).
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

#include "common/log.h"
#include "engine/engine.h"

namespace smddp::engine {
namespace {

// Before a sleep: see docs/threads.md for what each costs.
constexpr int kPauses = 20;
constexpr int kYields = 100;
// Between two looks at peers and deadlines while nothing advances.
constexpr Nanoseconds kLookPeriod = 5'000'000;
// How long a rank that is not in any call lets others wait for an answer.
constexpr auto kAnswerPeriod = std::chrono::milliseconds(250);
// How often the progress thread looks whether those who leave work in flight have come back for it.
constexpr auto kWatchPeriod = std::chrono::milliseconds(1);
// A waiter looks whether it can take ownership at least this often.
constexpr auto kWaiterPeriod = std::chrono::milliseconds(1);
// Callbacks that wait for other operations at the same time; no sane program has so many.
constexpr size_t kMaxThreads = 64;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// How long nothing has happened, and what to do about it. With `looks` it yields for so long, not so often.
struct Engine::Patience {
  Patience(Engine& engine, bool patient, Nanoseconds looks)
      : engine(&engine), rounds(patient ? kPauses : 0), looks(looks) {}
  // Whoever is waited for takes longer than a few pauses.
  bool yields() const { return rounds == kPauses; }
  // False: it is time to sleep.
  bool spin() {
    if (rounds++ < kPauses) {
      pause();
      return true;
    }
    const Clock& clock = engine->process_->clock();
    const Nanoseconds begun = clock.now();
    if (until == 0) until = begun + looks;
    const bool mayYield = looks > 0 ? begun < until : rounds <= kPauses + kYields;
    if (!mayYield || engine->crowding_.isCrowded(begun)) return false;
    sched_yield();
    engine->crowding_.yielded(begun, clock.now());
    return true;
  }
  Engine* engine;
  int rounds;
  Nanoseconds looks;
  Nanoseconds until = 0;
};

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
  if (!busy) habit_.ended();
  // What was posted while we let go has no other taker.
  if (inboxSize_.load() > 0 && tryOwn()) {
    guarded([this] {
      drainInbox();
      turn();
    });
    release();
  }
}

void Engine::waitUntil(const std::function<bool()>& done, Nanoseconds looks) {
  comeBack();
  bool asked = false;
  while (!done()) {
    if (tryOwn()) {
      guarded([&] { runOwned(done, /*patient=*/false, looks); });
      release();
      runContinuations();
      continue;
    }
    std::unique_lock lock(waitMutex_);
    waiters_.fetch_add(1);
    // A progress thread that sleeps as the owner lets go when it sees us.
    if (!std::exchange(asked, true)) process_->doorbell().ringSelf();
    waitChanged_.wait_for(lock, kWaiterPeriod, [&] { return done() || !owned_.load(); });
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
  habit_.left(process_->clock().now());
  if (watched_.load() && habit_.isSettled()) return;
  const std::lock_guard lock(threadMutex_);
  threadChanged_.notify_one();
}

void Engine::comeBack() {
  if (habit_.isLeft()) habit_.returned(process_->clock().now());
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

void Engine::runOwned(const std::function<bool()>& done, bool patient, Nanoseconds looks) {
  const auto fresh = [&] { return Patience(*this, patient, looks); };
  Patience patience = fresh();
  process_->noteCore();
  while (true) {
    drainInbox();
    const bool advanced = turn();
    if (done() || !continuations_.empty()) return;
    // The progress thread leaves the field to a caller that waits, who pays no hand-over from then on.
    if (patient && (waiters_.load() > 0 || mustBlock_.load())) return;
    if (advanced) {
      patience = fresh();
      continue;
    }
    if (patience.yields()) process_->moveApart();
    if (patience.spin()) continue;
    const Nanoseconds now = process_->clock().now();
    if (now >= nextLook_) {
      nextLook_ = now + kLookPeriod;
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
    process_->sleep(std::max<Nanoseconds>(nextLook_ - process_->clock().now(), 1), network);
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

// Parks a progress thread until something is in flight that nobody looks after, or for kAnswerPeriod: while nothing is
// in flight here, ranks of other nodes may wait for us and ask what we are doing. False when it is time to end.
bool Engine::awaitWork() {
  const auto now = [this] { return process_->clock().now(); };
  const auto isLeft = [&] { return busy_.load() && waiters_.load() == 0 && !owned_.load(); };
  const auto answer = std::chrono::steady_clock::now() + kAnswerPeriod;
  std::unique_lock lock(threadMutex_);
  ++idle_;
  while (!stop_ && blocking_.empty() && std::chrono::steady_clock::now() < answer) {
    // Said before we look: what is left at this moment is seen by us, or by who leaves it (handOver).
    const bool watches = habit_.isActive(now());
    watched_.store(watches);
    if (isLeft() && !(watches && habit_.expects(now()))) {
      if (watches) habit_.missed();
      break;
    }
    threadChanged_.wait_until(lock,
                              watches ? std::chrono::steady_clock::now() + kWatchPeriod : answer);
  }
  watched_.store(false);
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
      runOwned([this] { return active_.empty(); }, /*patient=*/true);
    });
    if (!continuations_.empty()) keepOneIdle();
    release();
    runContinuations();
  }
}

}  // namespace smddp::engine
