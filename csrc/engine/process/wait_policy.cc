#include "engine/process/wait_policy.h"

#include <algorithm>
#include <thread>

namespace smddp::engine::process {
namespace {

// A device needs some microseconds for a short copy, and as long as a backward pass for what comes before it.
constexpr int kYieldsForDevice = 50;
constexpr std::chrono::microseconds kLongestPoll{200};

void pauseInstruction() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

bool WaitPolicy::IdleWait::spin() {
  ++round_;
  pauseInstruction();
  return true;
}

bool WaitPolicy::IdleWait::yield() {
  const Clock& clock = policy_.process_.clock();
  if (round_ == kSpins)
    policy_.placement_.moveApart(policy_.process_.peers().matePages(), clock.now());
  ++round_;
  const Nanoseconds begun = clock.now();
  if (yieldUntil_ == 0) yieldUntil_ = begun + yieldFor_;
  const bool mayYield = yieldFor_ > 0 ? begun < yieldUntil_ : round_ <= kSpins + kYields;
  if (!mayYield || policy_.yields_.avoidsYields(begun)) return false;
  sched_yield();
  policy_.yields_.yielded(begun, clock.now());
  return true;
}

bool WaitPolicy::healthCheckDue() {
  const Nanoseconds now = process_.clock().now();
  if (now < nextHealthCheck_) return false;
  nextHealthCheck_ = now + kHealthPeriod;
  return true;
}

Nanoseconds WaitPolicy::untilHealthCheck() const {
  return std::max<Nanoseconds>(nextHealthCheck_ - process_.clock().now(), 1);
}

void PollingWait::wait() {
  if (++yields_ <= kYieldsForDevice) {
    std::this_thread::yield();
    return;
  }
  std::this_thread::sleep_for(sleep_);
  sleep_ = std::min(sleep_ * 2, kLongestPoll);
}

}  // namespace smddp::engine::process
