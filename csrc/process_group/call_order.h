// The order of calls. All ranks must make the collectives of a group in the same order. A callback of a future runs
// when its call has ended, which each rank sees at another moment: a collective that it makes may come before the next
// one of the main thread on one rank, and behind it on another. So a group has several orders. The calls of the script
// are one. The calls that callbacks make are others: each is a group of the engine of its own, with the same ranks,
// which is made when the first callback makes a call. Callbacks run one after the other, in the order in which their
// futures were asked for. So their calls come in the same order on all ranks, as well.
//
// Example: DDP asks for the futures of buckets 0 and 1, and a hook sums twice.
//
//   order of the script      sum(bucket 0), sum(bucket 1)
//   order of its callbacks   what the hook sums of bucket 0, what it sums of bucket 1
//
// Only collectives of one order are compared and matched. Messages (send, recv) belong to the script's order, whoever
// makes them: sender and receiver find each other by tag.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "engine/engine.h"

namespace smddp::process_group {

class Work;

// Completes futures of calls one after the other, in the order in which they were asked for, on progress threads.
// A future is completed when its call and all before it have ended, and the callbacks of those before it have returned.
//
// Threads: any. No lock is held while callbacks run. Keeps each Work until its future is complete.
class FutureQueue : public std::enable_shared_from_this<FutureQueue> {
 public:
  explicit FutureQueue(std::shared_ptr<engine::Engine> engine) : engine_(std::move(engine)) {}
  // False: nothing is before it, and the call has ended, so the caller completes the future.
  bool add(const c10::intrusive_ptr<Work>& work);
  // Completes the future of a call that has ended, if it is the next one; otherwise a progress thread will. In a
  // callback of an earlier call, which waits for this one, it cannot wait for its turn.
  void complete(Work& work);

 private:
  void wake();
  void loop();
  void completeNow(Work& work);
  // The next one whose call has ended; null, and the queue rests, if there is none.
  c10::intrusive_ptr<Work> next();

  const std::shared_ptr<engine::Engine> engine_;
  std::mutex mutex_;
  std::deque<c10::intrusive_ptr<Work>> waiting_;  // guarded by mutex_
  bool isRunning_ = false;                        // guarded by mutex_
};

// One order of a group.
//
// Threads: any. Lives as long as a call or a callback refers to it; its group of the engine is destroyed with the
// process group.
struct CallOrder {
  CallOrder(std::string name, std::shared_ptr<engine::Engine> engine,
            std::shared_ptr<engine::groups::Group> group)
      : name(std::move(name)),
        group(std::move(group)),
        futures(std::make_shared<FutureQueue>(std::move(engine))) {}

  // The order whose callback runs on this thread; null outside of callbacks.
  static const std::shared_ptr<CallOrder>& ofCallback();
  // While it lives, this thread runs a callback of a call of `order`.
  class Callback {
   public:
    explicit Callback(std::shared_ptr<CallOrder> order);
    ~Callback();
    Callback(const Callback&) = delete;
    Callback& operator=(const Callback&) = delete;

   private:
    std::shared_ptr<CallOrder> outer_;
  };

  const std::string name;  // the same on all ranks
  const std::shared_ptr<engine::groups::Group> group;
  std::atomic<uint64_t> sequence{0};  // of the last call
  const std::shared_ptr<FutureQueue> futures;
};

// The orders of a process group.
//
// Threads: any.
class CallOrders {
 public:
  CallOrders(std::shared_ptr<engine::Engine> engine, std::shared_ptr<engine::groups::Group> group);

  const std::shared_ptr<CallOrder>& script() const { return script_; }
  // The order of a call that this thread makes now. `make` makes its group of the engine when that is needed; the ranks
  // meet in it.
  using Make = std::function<std::shared_ptr<engine::groups::Group>(const std::string& name)>;
  std::shared_ptr<CallOrder> current(const Make& make);
  // The groups of all orders that exist, the script's first.
  std::vector<std::shared_ptr<engine::groups::Group>> groups() const;

 private:
  const std::shared_ptr<engine::Engine> engine_;
  const std::shared_ptr<CallOrder> script_;
  // `mutex` is held while the group is made, so a callback that needs the same one waits.
  struct Slot {
    std::mutex mutex;
    std::shared_ptr<CallOrder> order;  // guarded by mutex
  };
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Slot>> ofCallbacks_;  // guarded by mutex_; by name
};

}  // namespace smddp::process_group
