#include "engine/progress/deferred_calls.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <system_error>
#include <utility>

#include "common/interrupt.h"
#include "common/log.h"
#include "engine/process/wait_policy.h"

namespace smddp::engine::progress {
namespace {

// Runs `step`. Returns the error that it throws, which ends the call.
std::optional<Error> errorOf(const std::function<void()>& step) {
  try {
    step();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(ErrorKind::Transport, error.what());
  }
}

void endWith(DeferredCalls::Call& call, const Error& error) {
  try {
    call.end(error);
  } catch (const std::exception& thrown) {
    SMDDP_LOG(Warn, "engine", "while a call ended that had not begun: {}", thrown.what());
  }
}

}  // namespace

DeferredCalls::~DeferredCalls() { close(Error(ErrorKind::Aborted, "the group has ended")); }

void DeferredCalls::start() {
  if (thread_.joinable()) {
    if (startedBy_ == getpid()) return;
    raise(ErrorKind::Usage,
          "smddp cannot be used in a process that was forked after init_process_group(); "
          "initialise in the child instead, or start it with spawn");
  }
  try {
    thread_ = std::thread([state = state_] { loop(state); });
    startedBy_ = getpid();
  } catch (const std::system_error& error) {
    raise(ErrorKind::Resource, "no thread for calls on a device: {}", error.what());
  }
}

void DeferredCalls::add(Call call) {
  MutexLock lock(state_->mutex);
  if (state_->closed) {
    const Error error = *state_->closed;
    lock.unlock();
    endWith(call, error);
    return;
  }
  start();
  state_->waiting.fetch_add(1, std::memory_order_release);
  state_->calls.push_back(std::move(call));
  state_->changed.notifyAll();
}

void DeferredCalls::drain() {
  while (busy()) {
    checkInterrupt();
    MutexLock lock(state_->mutex);
    if (busy()) {
      state_->changed.waitFor(lock,
                              std::chrono::nanoseconds(process::WaitPolicy::kInterruptPeriod));
    }
  }
}

void DeferredCalls::close(const Error& error) {
  std::thread thread;
  bool ours = false;
  {
    const MutexLock lock(state_->mutex);
    if (state_->closed) return;
    state_->closed = error;
    state_->stop.store(true);
    state_->changed.notifyAll();
    ours = startedBy_ == getpid() && thread_.get_id() != std::this_thread::get_id();
    thread = std::move(thread_);
  }
  if (thread.joinable()) {
    if (ours) {
      thread.join();
    } else {
      thread.detach();
    }
  }
  // Nobody else takes calls out any more.
  std::deque<Call> left;
  {
    const MutexLock lock(state_->mutex);
    left.swap(state_->calls);
  }
  for (Call& call : left) endWith(call, error);
  stopWaiting(*state_, left.size());
}

void DeferredCalls::loop(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "smddp-deferred");
  MutexLock lock(state->mutex);
  while (true) {
    while (!state->stop.load() && state->calls.empty()) state->changed.wait(lock);
    if (state->stop) return;
    // The reference stays valid while others are added behind it.
    Call& head = state->calls.front();
    lock.unlock();
    serve(*state, head);
    lock.lock();
  }
}

void DeferredCalls::stopWaiting(State& state, size_t calls) {
  const MutexLock lock(state.mutex);
  state.waiting.fetch_sub(calls);
  state.changed.notifyAll();
}

void DeferredCalls::serve(State& state, Call& head) {
  const MonotonicClock clock;
  process::PollingWait wait;
  bool late = false;
  auto error = errorOf([&] {
    while (!state.stop && !head.ready()) {
      late = head.deadline.passed(clock);
      if (late) break;
      wait.wait();
    }
  });
  if (late) {
    error = Error(ErrorKind::Timeout,
                  "the time-out passed before the device had come to this call: what was queued "
                  "before it on its stream still runs");
  }
  Call call;
  {
    // After close() the call stays in the queue, and close() ends it.
    const MutexLock lock(state.mutex);
    if (state.stop) return;
    call = std::move(state.calls.front());
    state.calls.pop_front();
  }
  if (!error) error = errorOf(call.begin);
  stopWaiting(state, 1);
  if (error) endWith(call, *error);
}

}  // namespace smddp::engine::progress
