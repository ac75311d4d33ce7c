// The threads that run what callers leave in flight: one, and more when continuations or blocking actions keep it busy.
//
// The first thread starts with the engine, since it holds the life lock by which the ranks of this node see that the
// process lives. A thread is parked on a condition variable while there is nothing to do. It wakes four times a second;
// with several nodes it then also checks health.
//
// Threads: public functions from any thread. Ends with join(), which beginStop() comes before; in the child of a fork
// with forget(). Errors: what actions throw is logged. Without its first thread start() throws Resource; if a later one
// cannot be started, that is logged.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "common/mutex.h"
#include "engine/process/wait_policy.h"
#include "transport/shm/slab.h"

namespace smddp::engine::progress {

class Progress;

class ProgressThreads {
 public:
  ProgressThreads(Progress& progress, process::WaitPolicy& policy)
      : progress_(progress), policy_(policy) {}
  ProgressThreads(const ProgressThreads&) = delete;
  ProgressThreads& operator=(const ProgressThreads&) = delete;

  void start(std::shared_ptr<transport::shm::Slab> slab);
  void beginStop();
  void join();
  void forget() SMDDP_NO_THREAD_ANALYSIS;

  // Wakes a thread, because there is work that nobody waits for.
  void wakeOne();
  // Runs `action` on one of the threads, while another one is idle: it may block. After beginStop() on this thread.
  void runBlocking(std::function<void()> action);
  bool hasBlocking() const { return hasBlocking_.load(); }
  // Called before continuations run on one of the threads. They may wait for what only another one can complete.
  void keepOneIdle();

 private:
  void loop();
  bool awaitWork();
  void runBlockingActions();
  static void runAndLogErrors(const std::function<void()>& action);

  Progress& progress_;
  process::WaitPolicy& policy_;
  Mutex mutex_;
  ConditionVariable changed_;
  bool isStopping_ SMDDP_GUARDED_BY(mutex_) = false;
  int idle_ SMDDP_GUARDED_BY(mutex_) = 0;  // threads that wait for work
  std::deque<std::function<void()>> blocking_ SMDDP_GUARDED_BY(mutex_);
  std::atomic<bool> hasBlocking_{false};
  std::vector<std::thread> threads_ SMDDP_GUARDED_BY(mutex_);
};

}  // namespace smddp::engine::progress
