#include "process_group/work.h"

#include <algorithm>
#include <stdexcept>

#include "process_group/errors.h"

namespace smddp::process_group {

std::exception_ptr toTorch(const Error& error) {
  if (error.kind() == ErrorKind::Usage) {
    return std::make_exception_ptr(std::invalid_argument(error.what()));
  }
  return std::make_exception_ptr(BackendError(error));
}

void throwAsTorch(const Error& error) { std::rethrow_exception(toTorch(error)); }

Work::Work(int rank, std::shared_ptr<engine::Engine> engine, std::shared_ptr<engine::Group> group,
           Call call)
    : c10d::Work(rank, call.type, call.title, call.inputs),
      engine_(std::move(engine)),
      group_(std::move(group)),
      call_(std::move(call)) {}

void Work::start(std::vector<engine::CompletionPtr> completions) {
  completions_ = std::move(completions);
  // A profiler that is watching gets the end of its range when the operation ends, and tensors that were staged
  // their values, not when somebody asks.
  if (!recordFunctionEndCallback_ && !call_.staging.copiesBack()) return;
  whenDone([this] {
    settle();
    if (recordFunctionEndCallback_) c10d::Work::finish(exception());
  });
}

void Work::whenDone(std::function<void()> action) {
  if (allDone()) {
    action();
    return;
  }
  // The operations of a call may end in any order.
  const auto left = std::make_shared<std::atomic<size_t>>(completions_.size());
  const auto shared = std::make_shared<std::function<void()>>(std::move(action));
  for (const auto& completion : completions_) {
    const auto self = c10::intrusive_ptr<Work>::unsafe_reclaim_from_nonowning(this);
    completion->then([self, left, shared] {
      if (left->fetch_sub(1) == 1) (*shared)();
    });
  }
}

void Work::settle() {
  std::call_once(settled_, [this] {
    for (const auto& part : call_.parts) part->settle();
    if (firstError() == nullptr) call_.staging.finish();
  });
}

bool Work::allDone() const {
  return std::all_of(completions_.begin(), completions_.end(),
                     [](const auto& completion) { return completion->done(); });
}

const Error* Work::firstError() const {
  for (const auto& completion : completions_) {
    if (completion->done() && completion->error()) return &*completion->error();
  }
  return nullptr;
}

bool Work::isCompleted() {
  if (!allDone()) return false;
  settle();
  return true;
}

bool Work::isSuccess() const { return allDone() && firstError() == nullptr; }

std::exception_ptr Work::exception() const {
  const Error* error = firstError();
  return error == nullptr ? nullptr : toTorch(*error);
}

int Work::sourceRank() const { return completions_.front()->source(); }

std::vector<at::Tensor> Work::result() {
  TORCH_CHECK(isCompleted(), "Work needs to be completed before calling result()");
  TORCH_CHECK(call_.outputs.size() <= 1, "result() is for calls with one list of outputs");
  return call_.outputs.empty() ? std::vector<at::Tensor>{} : call_.outputs.front();
}

void Work::synchronize() { c10d::Work::synchronize(); }

bool Work::wait(std::chrono::milliseconds timeout) {
  const Nanoseconds patience = std::chrono::nanoseconds(timeout).count();
  translated([&] {
    for (const auto& completion : completions_) {
      if (timeout <= kNoTimeout) {
        engine_->wait(*completion);
      } else if (!engine_->waitFor(*completion, patience)) {
        engine_->expire(*group_, *completion, patience);
        engine_->wait(*completion);
      }
    }
    settle();
    if (const Error* error = firstError()) throw *error;
  });
  synchronize();
  return true;
}

void Work::abort() { engine_->abort(*group_, fmt::format("{} was aborted", call_.title)); }

at::IValue Work::futureValue() const {
  if (call_.outputs.empty()) return at::IValue(std::vector<at::Tensor>());
  if (call_.outputs.size() == 1) return at::IValue(call_.outputs.front());
  return at::IValue(call_.outputs);
}

void Work::finishFuture() {
  if (const auto error = exception()) {
    future_->setError(error);
  } else {
    future_->markCompleted(futureValue());
  }
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  bool isNew = false;
  {
    const std::lock_guard lock(futureMutex_);
    if (!future_) {
      const auto list = c10::ListType::create(c10::TensorType::get());
      future_ = c10::make_intrusive<at::ivalue::Future>(
          call_.outputs.size() <= 1 ? c10::TypePtr(list) : c10::ListType::create(list));
      isNew = true;
    }
  }
  if (!isNew) return future_;
  whenDone([this] {
    settle();
    finishFuture();
  });
  return future_;
}

}  // namespace smddp::process_group
