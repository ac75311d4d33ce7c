#include "process_group/hooks.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <string_view>
#include <system_error>
#include <thread>

#include "common/config.h"
#include "common/interrupt.h"
#include "engine/progress/fork_hold.h"
#include "process_group/flight_recorder.h"

namespace smddp::process_group {
namespace {

// How long hooks for a failure leave the processor and Python's interpreter lock to those who hear of it.
constexpr Nanoseconds kGrace = 1'000'000'000;
// To wake the thread for each call would take longer than the hooks.
constexpr Nanoseconds kBatch = 20'000'000;
constexpr Nanoseconds kLongestDrain = 100'000'000;
constexpr Nanoseconds kSignalPeriod = 50'000'000;

// Torch does not say which of its hooks are quick. This one notes that the group is not healthy, for the debug server.
bool isQuick(const std::function<void()>& hook) {
  return std::string_view(hook.target_type().name()).find("HealthCheckHook") !=
         std::string_view::npos;
}

}  // namespace

HookThread& HookThread::ofThisProcess() {
  static std::atomic<HookThread*> current{nullptr};
  HookThread* found = current.load(std::memory_order_acquire);
  while (found == nullptr || found->forkCount_ != engine::progress::forkCount()) {
    // The object of a parent process stays in memory, with locks that its threads may have held.
    auto fresh = std::unique_ptr<HookThread>(new HookThread);
    if (current.compare_exchange_strong(found, fresh.get())) found = fresh.release();
  }
  return *found;
}

HookThread::HookThread() : forkCount_(engine::progress::forkCount()) {}

bool HookThread::isStarted() {
  if (hasThread_) return true;
  try {
    std::thread([this] { loop(); }).detach();
    hasThread_ = true;
  } catch (const std::system_error& error) {
    SMDDP_LOG(Warn, "process_group", "no thread for hooks of torch's tools: {}", error.what());
  }
  return hasThread_;
}

void HookThread::callEnded(std::shared_ptr<const Hooks> hooks, uint64_t key, float milliseconds) {
  {
    const MutexLock lock(mutex_);
    if (isStarted()) {
      ended_.push_back({std::move(hooks), key, milliseconds});
      if (isParked_) changed_.notifyOne();
      return;
    }
  }
  hooks->completion.run(key, milliseconds);
}

void HookThread::groupFailed(const std::shared_ptr<Hooks>& hooks, bool wasInterrupted) {
  if (hooks->abort.empty() || settings().dumpSeconds == 0 || hooks->hasFailed.exchange(true))
    return;
  const MutexLock lock(mutex_);
  // Without a thread there is no dump: the error must not wait for it.
  if (isGivenUp_ || !isStarted()) return;
  failed_.push_back({wasInterrupted ? nullptr : hooks, clock_.now()});
  changed_.notifyOne();
}

void HookThread::waitForCalls() {
  const Deadline deadline = Deadline::after(clock_, kLongestDrain);
  MutexLock lock(mutex_);
  changed_.notifyOne();
  while ((!ended_.empty() || isRunning_) && !deadline.passed(clock_)) {
    idle_.waitFor(lock, std::chrono::nanoseconds(kSignalPeriod));
  }
}

bool HookThread::waitForAll() {
  MutexLock lock(mutex_);
  if (ended_.empty() && failed_.empty() && !isRunning_) return true;
  const Nanoseconds longest = fromSeconds(std::max<int64_t>(1, settings().dumpSeconds));
  const Deadline deadline = Deadline::after(clock_, longest);
  ++waiting_;
  changed_.notifyOne();
  while (!isGivenUp_ && !deadline.passed(clock_)) {
    idle_.waitFor(lock, std::chrono::nanoseconds(kSignalPeriod));
    if (ended_.empty() && failed_.empty() && !isRunning_) {
      --waiting_;
      return true;
    }
    lock.unlock();
    try {
      checkInterrupt();
    } catch (...) {
      lock.lock();
      giveUp();
      throw;
    }
    lock.lock();
  }
  giveUp();
  return false;
}

void HookThread::giveUp() {
  --waiting_;
  isGivenUp_ = true;
  failed_.clear();
}

void HookThread::loop() {
  pthread_setname_np(pthread_self(), kName);
  MutexLock lock(mutex_);
  for (;;) {
    if (!ended_.empty()) {
      runEnded(lock);
      if (waiting_ == 0) changed_.waitFor(lock, std::chrono::nanoseconds(kBatch));
    } else if (!failed_.empty()) {
      runFailed(lock);
    } else {
      isParked_ = true;
      changed_.wait(lock);
      isParked_ = false;
    }
  }
}

void HookThread::runEnded(MutexLock& lock) {
  const auto ended = std::exchange(ended_, {});
  isRunning_ = true;
  lock.unlock();
  for (const Ended& call : ended) call.hooks->completion.run(call.key, call.milliseconds);
  lock.lock();
  isRunning_ = false;
  idle_.notifyAll();
}

bool HookThread::beginFailed(MutexLock& lock) {
  const auto next = std::find_if(failed_.begin(), failed_.end(),
                                 [](const Failed& group) { return !group.isBegun; });
  if (next == failed_.end()) return false;
  next->isBegun = true;
  const auto hooks = next->hooks;
  isRunning_ = true;
  lock.unlock();
  if (hooks) hooks->abort.runIf(isQuick);
  dumpWithoutStacks();
  lock.lock();
  isRunning_ = false;
  return true;
}

void HookThread::runFailed(MutexLock& lock) {
  if (beginFailed(lock)) return;
  const bool hasHooks = failed_.front().hooks != nullptr;
  const Nanoseconds rest = failed_.front().since + kGrace - clock_.now();
  if (hasHooks && waiting_ == 0 && rest > 0) {
    changed_.waitFor(lock, std::chrono::nanoseconds(rest));
    return;
  }
  const Failed group = std::move(failed_.front());
  failed_.pop_front();
  isRunning_ = true;
  lock.unlock();
  if (hasHooks) {
    group.hooks->abort.runIf([](const auto& hook) { return !isQuick(hook); });
    dumpWithStacks();
  }
  lock.lock();
  isRunning_ = false;
  idle_.notifyAll();
}

}  // namespace smddp::process_group
