#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "process_group/work.h"

namespace smddp::process_group {

// Waits for whichever of several calls ends first: c10d can wait for one only.
//
// One thread waits at a time, any thread interrupts. Owns nothing of the calls and changes nothing of them:
// whoever wants to know how one has ended calls its wait(), which then returns at once.
class Waiter {
 public:
  Waiter();

  // The positions of all calls that have ended: at least one, unless interrupt() was called, which ends the
  // wait that it meets or the next one. With `block` false it only looks.
  std::vector<size_t> wait(const std::vector<c10d::Work*>& works, bool block);
  void interrupt();

 private:
  const std::shared_ptr<engine::Engine> engine_;
  std::atomic<bool> interrupted_{false};
};

}  // namespace smddp::process_group
