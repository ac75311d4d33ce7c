#include "engine/forks.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "engine/engine.h"

namespace smddp::engine {
namespace {

// How long a fork may wait for the owner to come to a stop. Who is busier than that, in the set-up of the network
// for example, is not waited for; the child then keeps its copies of the connections.
constexpr auto kForkPatience = std::chrono::seconds(1);
// Between two looks whether the owner has let go.
constexpr auto kForkPeriod = std::chrono::milliseconds(1);

std::atomic<uint32_t> generation{0};
// Held from before a fork until after it, and while the list changes.
std::mutex forkMutex;
// Engines whose connections a child must not keep alive. More than these are ranks as threads, which do not fork.
std::array<std::atomic<Engine*>, 8> engines{};

template <typename Action>
void forEachEngine(const Action& action) {
  for (auto& slot : engines) {
    if (Engine* engine = slot.load()) action(*engine);
  }
}

void beforeFork() {
  forkMutex.lock();
  forEachEngine([](Engine& engine) { engine.beforeFork(); });
}

void afterForkInParent() {
  forEachEngine([](Engine& engine) { engine.afterForkInParent(); });
  forkMutex.unlock();
}

void afterForkInChild() {
  ++generation;
  forEachEngine([](Engine& engine) { engine.afterForkInChild(); });
  forkMutex.unlock();
}

}  // namespace

uint32_t watchForks() {
  static const int registered = pthread_atfork(&beforeFork, &afterForkInParent, &afterForkInChild);
  static_cast<void>(registered);
  return generation.load();
}

uint32_t forkGeneration() { return generation.load(std::memory_order_relaxed); }

void enroll(Engine* engine) {
  const std::lock_guard lock(forkMutex);
  for (auto& slot : engines) {
    Engine* nobody = nullptr;
    if (slot.compare_exchange_strong(nobody, engine)) return;
  }
}

void strike(Engine* engine) {
  const std::lock_guard lock(forkMutex);
  for (auto& slot : engines) {
    Engine* expected = engine;
    slot.compare_exchange_strong(expected, nullptr);
  }
}

// Keeps the owner, between two turns, until the fork is over.
struct Engine::ForkPause {
  std::mutex mutex;
  std::condition_variable changed;
  bool held = false;  // guarded by mutex, as is `over`
  bool over = false;

  void hold() {
    std::unique_lock lock(mutex);
    held = true;
    changed.notify_all();
    changed.wait(lock, [this] { return over; });
  }
  void end() {
    const std::lock_guard lock(mutex);
    over = true;
    changed.notify_all();
  }
};

void Engine::beforeFork() {
  ownedForFork_ = false;
  pausedForFork_.reset();
  // A child that forks again has nothing to hold still.
  if (forkGeneration_ != forkGeneration()) return;
  ownedForFork_ = tryOwn();
  if (ownedForFork_) return;
  auto pause = std::make_shared<ForkPause>();
  {
    // Not by post(), which may run what is posted on this thread.
    const std::lock_guard lock(inboxMutex_);
    inbox_.push_back([pause] { pause->hold(); });
    inboxSize_.store(inbox_.size());
  }
  process_->doorbell().ringSelf();
  const auto limit = std::chrono::steady_clock::now() + kForkPatience;
  std::unique_lock lock(pause->mutex);
  while (!pause->held && !ownedForFork_ && std::chrono::steady_clock::now() < limit) {
    pause->changed.wait_for(lock, kForkPeriod);
    // The owner let go before it looked into the inbox.
    ownedForFork_ = !pause->held && tryOwn();
  }
  if (pause->held) {
    pausedForFork_ = std::move(pause);
  } else {
    pause->over = true;
  }
}

void Engine::afterForkInParent() {
  if (ownedForFork_) release();
  if (pausedForFork_) pausedForFork_->end();
  pausedForFork_.reset();
}

void Engine::afterForkInChild() noexcept {
  if (ownedForFork_ || pausedForFork_) process_->closeInChild();
}

}  // namespace smddp::engine
