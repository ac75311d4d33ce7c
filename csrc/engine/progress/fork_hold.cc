#include "engine/progress/fork_hold.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>

#include "common/mutex.h"

namespace smddp::engine::progress {
namespace {

// A fork may wait so long for the owner to stop. An owner may be busy for longer, for example with the set-up of the
// network. Then the child keeps its copies of the connections.
constexpr auto kTimeout = std::chrono::seconds(1);
// The forking thread tries so often to become the owner meanwhile.
constexpr auto kPoll = std::chrono::milliseconds(1);

std::atomic<uint32_t> forks{0};
// Held from before a fork until after it, and while the list changes.
Mutex mutex;
// Engines whose connections a child must not keep alive. Only tests have more: their ranks are threads, which do not
// fork.
std::array<std::atomic<ForkHold*>, 8> holds{};

template <typename Action>
void forEachHold(const Action& action) {
  for (auto& slot : holds) {
    if (ForkHold* hold = slot.load()) action(*hold);
  }
}

// The handlers of pthread_atfork(): one takes the lock, another one lets go of it.
void beforeFork() SMDDP_NO_THREAD_ANALYSIS {
  mutex.lock();
  forEachHold([](ForkHold& hold) { hold.beforeFork(); });
}

void afterForkInParent() SMDDP_NO_THREAD_ANALYSIS {
  forEachHold([](ForkHold& hold) { hold.afterForkInParent(); });
  mutex.unlock();
}

void afterForkInChild() SMDDP_NO_THREAD_ANALYSIS {
  ++forks;
  forEachHold([](ForkHold& hold) { hold.afterForkInChild(); });
  mutex.unlock();
}

}  // namespace

uint32_t countForks() {
  static const int registered = pthread_atfork(&beforeFork, &afterForkInParent, &afterForkInChild);
  static_cast<void>(registered);
  return forkCount();
}

uint32_t forkCount() { return forks.load(std::memory_order_relaxed); }

// Keeps the owner, between two turns, until the fork is over.
struct ForkHold::Pause {
  Mutex mutex;
  ConditionVariable changed;
  bool isHeld SMDDP_GUARDED_BY(mutex) = false;
  bool isOver SMDDP_GUARDED_BY(mutex) = false;

  void hold() {
    MutexLock lock(mutex);
    isHeld = true;
    changed.notifyAll();
    while (!isOver) changed.wait(lock);
  }
  void end() {
    const MutexLock lock(mutex);
    isOver = true;
    changed.notifyAll();
  }
};

ForkHold::ForkHold(Ownership& ownership, Progress& progress, process::Process& process)
    : ownership_(ownership), progress_(progress), process_(process), forkCount_(countForks()) {
  const MutexLock lock(mutex);
  for (auto& slot : holds) {
    ForkHold* nobody = nullptr;
    if (slot.compare_exchange_strong(nobody, this)) return;
  }
}

ForkHold::~ForkHold() {
  const MutexLock lock(mutex);
  for (auto& slot : holds) {
    ForkHold* expected = this;
    slot.compare_exchange_strong(expected, nullptr);
  }
}

// Ownership passes from this function to afterForkInParent(), which the analysis cannot follow.
void ForkHold::beforeFork() {
  isOwner_ = false;
  pause_.reset();
  // A child that forks again has nothing to hold still.
  if (forkCount_ != forkCount()) return;
  isOwner_ = ownership_.tryAcquire();
  if (isOwner_) return;
  auto pause = std::make_shared<Pause>();
  progress_.leaveForOwner([pause] { pause->hold(); });
  const auto limit = std::chrono::steady_clock::now() + kTimeout;
  MutexLock lock(pause->mutex);
  while (!pause->isHeld && !isOwner_ && std::chrono::steady_clock::now() < limit) {
    pause->changed.waitFor(lock, kPoll);
    // The owner let go before it looked into the inbox.
    isOwner_ = !pause->isHeld && ownership_.tryAcquire();
  }
  if (pause->isHeld) {
    pause_ = pause;
  } else {
    pause->isOver = true;
  }
}

void ForkHold::afterForkInParent() {
  if (isOwner_) progress_.letGo();
  if (pause_) pause_->end();
  pause_.reset();
}

void ForkHold::afterForkInChild() noexcept {
  if (isOwner_ || pause_) process_.peers().closeInChild();
}

}  // namespace smddp::engine::progress
