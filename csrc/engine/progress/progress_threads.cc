#include "engine/progress/progress_threads.h"

#include <pthread.h>

#include <system_error>
#include <utility>

#include "common/error.h"
#include "common/log.h"
#include "engine/progress/progress.h"
#include "transport/shm/liveness.h"

namespace smddp::engine::progress {
namespace {

// Far more threads than any program needs: one for each continuation that waits for another operation.
constexpr size_t kMaxThreads = 64;

}  // namespace

void ProgressThreads::start(std::shared_ptr<transport::shm::Slab> slab) {
  const MutexLock lock(mutex_);
  try {
    threads_.emplace_back([this, slab = std::move(slab)] {
      const transport::shm::LifeLock lifeLock(slab);
      loop();
    });
  } catch (const std::system_error& error) {
    raise(ErrorKind::Resource,
          "no thread can be started ({}); raise the limit on processes (ulimit -u; pids.max of the "
          "container or job)",
          error.what());
  }
}

void ProgressThreads::beginStop() {
  const MutexLock lock(mutex_);
  isStopping_ = true;
  changed_.notifyAll();
}

void ProgressThreads::join() {
  std::vector<std::thread> threads;
  {
    const MutexLock lock(mutex_);
    threads.swap(threads_);
  }
  for (auto& thread : threads) thread.join();
}

void ProgressThreads::forget() {
  // Takes no lock, because a thread of the parent may have held it.
  for (auto& thread : threads_) thread.detach();
}

void ProgressThreads::wakeOne() {
  const MutexLock lock(mutex_);
  changed_.notifyOne();
}

void ProgressThreads::runBlocking(std::function<void()> action) {
  {
    const MutexLock lock(mutex_);
    if (!isStopping_) {
      blocking_.push_back(std::move(action));
      hasBlocking_.store(true);
      changed_.notifyOne();
      return;
    }
  }
  runAndLogErrors(action);
}

// A caller that runs the engine never runs these: it might hold a lock, and wants to go on. One at a time, because it
// may wait for what the next one does: that is for a thread that is idle.
void ProgressThreads::runBlockingActions() {
  while (hasBlocking_.load()) {
    std::function<void()> action;
    {
      const MutexLock lock(mutex_);
      if (blocking_.empty()) return;
      action = std::move(blocking_.front());
      blocking_.pop_front();
      hasBlocking_.store(!blocking_.empty());
      if (!blocking_.empty()) changed_.notifyOne();
    }
    keepOneIdle();
    runAndLogErrors(action);
  }
}

void ProgressThreads::runAndLogErrors(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    SMDDP_LOG(Warn, "engine", "a callback threw: {}", error.what());
  }
}

void ProgressThreads::keepOneIdle() {
  const MutexLock lock(mutex_);
  if (isStopping_ || idle_ > 0) return;
  if (threads_.size() >= kMaxThreads) {
    SMDDP_LOG(Warn, "engine", "{} callbacks of finished operations are at work or wait",
              threads_.size());
    return;
  }
  try {
    threads_.emplace_back([this] { loop(); });
  } catch (const std::system_error& error) {
    SMDDP_LOG(Warn, "engine", "no thread for progress beside callbacks: {}", error.what());
  }
}

// Parks the thread until something is in flight that nobody waits for, or for kAnswerPeriod: while nothing is in flight
// here, ranks of other nodes may wait for us and ask what we are doing. False when it is time to end, and no blocking
// action is left.
bool ProgressThreads::awaitWork() {
  const auto answer = std::chrono::steady_clock::now() + process::WaitPolicy::kAnswerPeriod;
  MutexLock lock(mutex_);
  ++idle_;
  while (!isStopping_ && blocking_.empty() && std::chrono::steady_clock::now() < answer) {
    // Published before we look for work. So either we see the work that a thread leaves at this moment, or that thread
    // sees whether it has to wake us.
    const bool polls = policy_.beginPoll();
    if (progress_.hasContinuations()) break;
    if (progress_.hasUnattendedWork() && policy_.takesWork(polls)) break;
    changed_.waitUntil(
        lock, polls ? std::chrono::steady_clock::now() + process::WaitPolicy::kParkedPoll : answer);
  }
  policy_.endPoll();
  --idle_;
  return !isStopping_ || !blocking_.empty();
}

void ProgressThreads::loop() {
  pthread_setname_np(pthread_self(), "smddp-progress");
  while (awaitWork()) {
    runBlockingActions();
    progress_.runUnattendedWork();
  }
}

}  // namespace smddp::engine::progress
