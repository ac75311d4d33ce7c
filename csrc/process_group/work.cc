#include "process_group/work.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "common/clock.h"
#include "process_group/errors.h"
#include "process_group/timeouts.h"

namespace smddp::process_group {
namespace {

uint64_t nextCompletionKey() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

Work::Work(int rank, std::shared_ptr<engine::Engine> engine,
           std::shared_ptr<engine::groups::Group> group, Call call)
    : c10d::Work(rank, call.type, call.title, call.memory->inputs),
      engine_(std::move(engine)),
      group_(std::move(group)),
      completionKey_(nextCompletionKey()),
      call_(std::move(call)),
      start_(call_.hooks && !call_.hooks->completion.empty() ? MonotonicClock().now() : 0) {}

void Work::setOperations(Completions completions) {
  completions_ = std::move(completions);
  // A profiler's range must end, and staged tensors must get their values, when the operation ends, not when somebody
  // asks.
  if (!recordFunctionEndCallback_ && !call_.staging.copiesBack() && start_ == 0) return;
  whenEnded([this] {
    settle();
    if (recordFunctionEndCallback_) c10d::Work::finish(exception());
    if (start_ != 0) report();
  });
}

void Work::report() {
  milliseconds_ = static_cast<float>(MonotonicClock().now() - start_) * 1e-6f;
  if (firstError() != nullptr) return;
  HookThread::ofThisProcess().callEnded(call_.hooks, completionKey_, milliseconds_);
}

void Work::whenEnded(std::function<void()> action) {
  if (hasEnded()) {
    action();
    return;
  }
  // The operations of a call may end in any order.
  struct Rest {
    c10::intrusive_ptr<Work> self;
    std::function<void()> action;
    std::atomic<size_t> left;
  };
  const auto rest =
      std::make_shared<Rest>(c10::intrusive_ptr<Work>::unsafe_reclaim_from_nonowning(this),
                             std::move(action), completions_.size());
  for (const auto& completion : completions_) {
    completion->then([rest] {
      if (rest->left.fetch_sub(1) == 1) rest->action();
    });
  }
}

void Work::settle() {
  // Most calls have nothing to copy, and call_once costs a system call.
  if (call_.parts.empty() && !call_.staging.copiesBack()) return;
  std::call_once(settled_, [this] {
    for (const auto& part : call_.parts) part->settle();
    try {
      call_.staging.finish(firstError() == nullptr);
    } catch (const std::exception& error) {
      // A device that has failed does not recover. Whoever waits gets the error.
      if (call_.staging.device()) call_.staging.device()->abandon();
      copyError_.emplace(ErrorKind::Transport, error.what());
      copyFailed_.store(true, std::memory_order_release);
    }
  });
}

std::vector<DeviceCall*> Work::deviceCalls() const {
  std::vector<DeviceCall*> all;
  if (call_.staging.device()) all.push_back(call_.staging.device().get());
  for (const auto& part : call_.parts) {
    if (part->call_.staging.device()) all.push_back(part->call_.staging.device().get());
  }
  return all;
}

bool Work::hasEnded() const {
  return std::all_of(completions_.begin(), completions_.end(),
                     [](const auto& completion) { return completion->done(); });
}

const Error* Work::firstError() const {
  for (const auto& completion : completions_) {
    if (completion->done() && completion->error()) return &*completion->error();
  }
  if (copyFailed_.load(std::memory_order_acquire)) return &*copyError_;
  for (const auto& part : call_.parts) {
    if (const Error* error = part->firstError()) return error;
  }
  return nullptr;
}

bool Work::isCompleted() {
  if (!hasEnded()) return false;
  settle();
  if (const auto future = futureIfAny(); future && !future->completed()) return false;
  const auto all = deviceCalls();
  return firstError() != nullptr ||
         std::all_of(all.begin(), all.end(), [](const auto* call) { return call->ended(); });
}

float Work::getDuration() const {
  TORCH_CHECK(milliseconds_ >= 0, "smddp: only calls of groups with a completion hook are timed");
  return milliseconds_;
}

bool Work::isSuccess() const { return hasEnded() && firstError() == nullptr; }

std::exception_ptr Work::exception() const {
  const Error* error = firstError();
  return error == nullptr ? nullptr : toTorch(*error);
}

int Work::sourceRank() const {
  TORCH_CHECK(!completions_.empty(), "only a receive has a source rank");
  return completions_.front()->source();
}

std::vector<at::Tensor> Work::result() {
  TORCH_CHECK(hasEnded(), "Work needs to be completed before calling result()");
  settle();
  TORCH_CHECK(call_.memory->outputs.size() <= 1, "result() is for calls with one list of outputs");
  return call_.memory->outputs.empty() ? std::vector<at::Tensor>{} : call_.memory->outputs.front();
}

void Work::synchronize() {
  if (!deviceCalls().empty()) {
    wait();
  } else {
    // Takes this out of torch's registry of works in flight.
    c10d::Work::synchronize();
  }
}

bool Work::wait(std::chrono::milliseconds timeout) {
  const Nanoseconds patience = nanosecondsOf(timeout);
  const MonotonicClock clock;
  const Deadline deadline = Deadline::after(clock, patience);
  translated([&] {
    for (const auto& completion : completions_) {
      if (timeout <= kNoTimeout) {
        engine_->wait(*group_, *completion);
      } else if (!engine_->waitFor(*group_, *completion,
                                   std::max<Nanoseconds>(0, deadline.at - clock.now()))) {
        engine_->expire(*group_, *completion, patience);
        engine_->wait(*group_, *completion);
      }
    }
    settle();
    if (const auto future = futureIfAny()) {
      if (call_.order) {
        // Not here if another call is before it: callbacks have one order on all ranks, which may wait in others.
        call_.order->futures->complete(*this);
      } else {
        finishFuture();
      }
      // Another thread may be about to complete it.
      future->wait();
    }
    hasWaited_ = true;
    if (const Error* error = firstError()) throw *error;
  });
  for (const auto* call : deviceCalls()) call->makeStreamWait();
  c10d::Work::synchronize();
  return true;
}

void Work::abort() {
  engine_->fail(*group_, Error(ErrorKind::Aborted, fmt::format("{} was aborted", call_.title)));
}

at::IValue Work::futureValue() const {
  if (call_.memory->outputs.empty()) return at::IValue(std::vector<at::Tensor>());
  if (call_.memory->outputs.size() == 1) return at::IValue(call_.memory->outputs.front());
  return at::IValue(call_.memory->outputs);
}

void Work::finishFuture() {
  if (isFutureTaken_.exchange(true)) return;
  settle();
  if (const auto error = exception()) {
    future_->setError(error);
    return;
  }
  const auto all = deviceCalls();
  if (all.empty()) {
    future_->markCompleted(futureValue());
    return;
  }
  // The future takes the current stream as the one on which its value is made.
  const c10::Stream stream = all.front()->stream();
  for (size_t i = 1; i < all.size(); ++i) all[i]->makeStreamWait(stream);
  const c10::StreamGuard guard(stream);
  future_->markCompleted(futureValue());
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  bool isNew = false;
  {
    const std::lock_guard lock(futureMutex_);
    if (!future_) {
      const auto list = c10::ListType::create(c10::TensorType::get());
      std::vector<c10::Device> devices;
      if (const auto all = deviceCalls(); !all.empty()) devices = {all.front()->stream().device()};
      future_ = c10::make_intrusive<at::ivalue::Future>(
          call_.memory->outputs.size() <= 1 ? c10::TypePtr(list) : c10::ListType::create(list),
          devices);
      isNew = true;
    }
  }
  if (!isNew) return future_;
  const auto self = c10::intrusive_ptr<Work>::unsafe_reclaim_from_nonowning(this);
  if (hasWaited_) {
    finishFuture();
  } else if (call_.order) {
    if (!call_.order->futures->add(self)) finishFuture();
  } else if (hasEnded()) {
    finishFuture();
  } else {
    // Its callbacks may wait for a lock that a thread holds in a call.
    whenEnded([self] { self->engine_->progress().runBlocking([self] { self->finishFuture(); }); });
  }
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::futureIfAny() const {
  const std::lock_guard lock(futureMutex_);
  return future_;
}

}  // namespace smddp::process_group
