#include "process_group/waiter.h"

#include <algorithm>
#include <stdexcept>

#include "process_group/errors.h"
#include "process_group/process_group.h"

namespace smddp::process_group {

namespace {

std::vector<size_t> ended(const std::vector<c10d::Work*>& works) {
  std::vector<size_t> positions;
  for (size_t i = 0; i < works.size(); ++i) {
    if (works[i]->isCompleted()) positions.push_back(i);
  }
  return positions;
}

}  // namespace

Waiter::Waiter() : engine_(sharedEngine()) {}

std::vector<size_t> Waiter::wait(const std::vector<c10d::Work*>& works, bool block) {
  std::vector<size_t> positions = ended(works);
  if (!positions.empty() || !block) return positions;
  std::vector<engine::CompletionPtr> completions;
  for (const c10d::Work* work : works) {
    const auto* ours = dynamic_cast<const Work*>(work);
    if (ours == nullptr) throw std::invalid_argument("Waiter: a call of another backend");
    const auto& some = ours->completions();
    completions.insert(completions.end(), some.begin(), some.end());
  }
  while (positions.empty() && !interrupted_.exchange(false)) {
    translated([&] { engine_->waitForAny(completions, interrupted_); });
    positions = ended(works);
    // A call may be made of several operations: those that have ended must not end the wait again.
    std::erase_if(completions, [](const auto& completion) { return completion->done(); });
  }
  return positions;
}

void Waiter::interrupt() {
  interrupted_.store(true, std::memory_order_release);
  engine_->wakeWaiters();
}

}  // namespace smddp::process_group
