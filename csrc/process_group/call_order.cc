#include "process_group/call_order.h"

#include <utility>

#include "process_group/work.h"

namespace smddp::process_group {
namespace {

std::shared_ptr<CallOrder>& ofThisThread() {
  thread_local std::shared_ptr<CallOrder> order;
  return order;
}

// The queue whose callbacks this thread runs; null: none.
const FutureQueue*& runningHere() {
  thread_local const FutureQueue* queue = nullptr;
  return queue;
}

}  // namespace

// --- FutureQueue ------------------------------------------------------------------------------------------

bool FutureQueue::add(const c10::intrusive_ptr<Work>& work) {
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.empty() && !isRunning_ && work->hasEnded()) return false;
    waiting_.push_back(work);
  }
  work->whenEnded([self = shared_from_this()] { self->wake(); });
  return true;
}

void FutureQueue::wake() {
  {
    const std::lock_guard lock(mutex_);
    if (isRunning_ || waiting_.empty() || !waiting_.front()->hasEnded()) return;
    isRunning_ = true;
  }
  engine_->progress().runBlocking([self = shared_from_this()] { self->loop(); });
}

void FutureQueue::complete(Work& work) {
  if (runningHere() == this) return work.finishFuture();
  {
    const std::lock_guard lock(mutex_);
    if (isRunning_ || waiting_.empty() || waiting_.front().get() != &work) return;
    isRunning_ = true;
    waiting_.pop_front();
  }
  completeNow(work);
  {
    const std::lock_guard lock(mutex_);
    isRunning_ = false;
  }
  wake();
}

void FutureQueue::loop() {
  while (const auto work = next()) completeNow(*work);
}

void FutureQueue::completeNow(Work& work) {
  const auto* outer = std::exchange(runningHere(), this);
  try {
    work.finishFuture();
  } catch (const std::exception& error) {
    SMDDP_LOG(Warn, "process_group", "a callback threw: {}", error.what());
  }
  runningHere() = outer;
}

c10::intrusive_ptr<Work> FutureQueue::next() {
  const std::lock_guard lock(mutex_);
  if (waiting_.empty() || !waiting_.front()->hasEnded()) {
    isRunning_ = false;
    return {};
  }
  auto work = std::move(waiting_.front());
  waiting_.pop_front();
  return work;
}

// --- CallOrder --------------------------------------------------------------------------------------------

const std::shared_ptr<CallOrder>& CallOrder::ofCallback() { return ofThisThread(); }

CallOrder::Callback::Callback(std::shared_ptr<CallOrder> order)
    : outer_(std::exchange(ofThisThread(), std::move(order))) {}

CallOrder::Callback::~Callback() { ofThisThread() = std::move(outer_); }

// --- CallOrders -------------------------------------------------------------------------------------------

CallOrders::CallOrders(std::shared_ptr<engine::Engine> engine,
                       std::shared_ptr<engine::groups::Group> group)
    : engine_(std::move(engine)),
      script_(std::make_shared<CallOrder>(group->spec.name, engine_, group)) {}

std::shared_ptr<CallOrder> CallOrders::current(const Make& make) {
  const auto& caller = CallOrder::ofCallback();
  if (!caller) return script_;
  const std::string name =
      fmt::format("{}, calls from callbacks of {}", script_->name, caller->name);
  std::shared_ptr<Slot> slot;
  {
    const std::lock_guard lock(mutex_);
    auto& entry = ofCallbacks_[name];
    if (!entry) entry = std::make_shared<Slot>();
    slot = entry;
  }
  const std::lock_guard lock(slot->mutex);
  if (!slot->order) slot->order = std::make_shared<CallOrder>(name, engine_, make(name));
  return slot->order;
}

std::vector<std::shared_ptr<engine::groups::Group>> CallOrders::groups() const {
  std::vector<std::shared_ptr<engine::groups::Group>> all{script_->group};
  const std::lock_guard lock(mutex_);
  for (const auto& [name, slot] : ofCallbacks_) {
    // Whoever holds it makes a group, which nobody has used yet.
    const std::unique_lock made(slot->mutex, std::try_to_lock);
    if (made.owns_lock() && slot->order) all.push_back(slot->order->group);
  }
  return all;
}

}  // namespace smddp::process_group
