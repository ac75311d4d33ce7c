// The outcome of one operation: all that the layers above hear of it.
//
// Set once, by the thread that owns the engine; read by any. It outlives the group: Work holds a reference. The first
// error is kept and every waiter gets the same one. Continuations copy staged tensors back, submit the next part of a
// call, tell the profiler; log texts call them callbacks. The thread that completed the operation runs them after the
// result is visible. It then holds no lock and does not own the engine, so a continuation may submit and wait for
// further operations. Code of the user goes from there to Progress::runBlocking.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/mutex.h"
#include "common/types.h"

namespace smddp::engine::calls {

class Completion {
 public:
  // [thread-safe]
  bool done() const { return done_.load(std::memory_order_acquire); }
  // [thread-safe] The error of a finished operation, if it failed.
  const std::optional<Error>& error() const { return error_; }
  // [thread-safe] The sender of a message received, once done.
  Rank source() const { return source_; }
  uint64_t sequence() const { return sequence_; }

  // Runs `action` once, when the operation has ended; at once when it already has. [thread-safe]
  void then(std::function<void()> action) {
    {
      const MutexLock lock(mutex_);
      if (!done()) {
        continuations_.push_back(std::move(action));
        return;
      }
    }
    action();
  }

  // For the engine. Makes the result visible; the caller runs the returned continuations when it may.
  std::vector<std::function<void()>> complete(std::optional<Error> error) {
    const MutexLock lock(mutex_);
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
    return std::exchange(continuations_, {});
  }
  // Finishes an operation that nobody except its submitter knows of yet.
  void finishUnseen() { done_.store(true, std::memory_order_release); }
  void setSource(Rank source) { source_ = source; }
  void setSequence(uint64_t sequence) { sequence_ = sequence; }

 private:
  std::atomic<bool> done_{false};
  std::optional<Error> error_;
  Rank source_ = -1;
  uint64_t sequence_ = 0;
  Mutex mutex_;
  std::vector<std::function<void()>> continuations_ SMDDP_GUARDED_BY(mutex_);
};

using CompletionPtr = std::shared_ptr<Completion>;

}  // namespace smddp::engine::calls
