// Calls that may not begin yet, such as those whose buffers a device still fills. Each brings a test that says when it
// may. They begin in the order made.
//
// One queue per group: what is called while a call waits has to wait behind it, or ranks would number their calls
// differently.
//
// Threads: public functions from any. ready(), begin() and end() run on a thread of the queue's own, which starts
// with the first call and is parked while there is none. It calls ready() of the first call again and again, because
// nobody wakes it when the answer changes.
// Ends: close() (or the destructor) ends what waits, on the caller's thread. The child of a fork has the object,
// but no thread, and is refused.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "common/clock.h"
#include "common/error.h"
#include "common/mutex.h"

namespace smddp::engine::progress {

class DeferredCalls {
 public:
  struct Call {
    // Returns whether the call may begin. An exception of it ends the call.
    std::function<bool()> ready;
    // Hands the call on; must not wait for anything.
    std::function<void()> begin;
    // Called instead of begin(), or after a begin() that threw.
    std::function<void(const Error&)> end;
    Deadline deadline;
  };

  DeferredCalls() = default;
  ~DeferredCalls();
  DeferredCalls(const DeferredCalls&) = delete;
  DeferredCalls& operator=(const DeferredCalls&) = delete;

  // True if a call made now has to queue.
  bool busy() const { return state_->waiting.load(std::memory_order_acquire) > 0; }
  // Blocks until no call waits: at the latest, when the last deadline has passed.
  void drain();
  // After close() the call ends at once.
  void add(Call call);
  // Ends the calls that wait, and all later ones, with this error. Idempotent.
  void close(const Error& error);

 private:
  // Shared with the thread, which may outlive the object: end() of a call may destroy the group.
  struct State {
    Mutex mutex;
    ConditionVariable changed;  // tells of changes of calls, stop and waiting
    std::deque<Call> calls SMDDP_GUARDED_BY(mutex);
    std::optional<Error> closed SMDDP_GUARDED_BY(mutex);  // set once
    std::atomic<bool> stop{false};
    std::atomic<size_t> waiting{0};  // calls that have not begun
  };
  static void loop(const std::shared_ptr<State>& state);
  static void serve(State& state, Call& head);
  // Notes that this number of calls no longer waits.
  static void stopWaiting(State& state, size_t calls);
  void start() SMDDP_REQUIRES(state_->mutex);

  const std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_ SMDDP_GUARDED_BY(state_->mutex);
  pid_t startedBy_ SMDDP_GUARDED_BY(state_->mutex) = 0;
};

}  // namespace smddp::engine::progress
