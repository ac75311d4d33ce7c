// Actions for the engine's owner, left by threads that found the engine owned.
//
// Threads: push() and empty() any; take() the owner, who calls it at every turn. A thread that lets go of the engine
// looks here once more, and a thread that has pushed tries once more to become the owner: so nothing is left that
// nobody takes. Ends with the engine; what is left then is dropped.
#pragma once

#include <atomic>
#include <functional>
#include <utility>
#include <vector>

#include "common/mutex.h"

namespace smddp::engine::progress {

class Inbox {
 public:
  using Action = std::function<void()>;

  void push(Action action) {
    const MutexLock lock(mutex_);
    actions_.push_back(std::move(action));
    size_.store(actions_.size());
  }
  bool empty() const { return size_.load() == 0; }
  // All of them, in the order pushed.
  std::vector<Action> take() {
    const MutexLock lock(mutex_);
    size_.store(0);
    return std::exchange(actions_, {});
  }

 private:
  Mutex mutex_;
  std::vector<Action> actions_ SMDDP_GUARDED_BY(mutex_);
  std::atomic<size_t> size_{0};
};

}  // namespace smddp::engine::progress
