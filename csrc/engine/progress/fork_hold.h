// Holds an engine still around a fork of its process, so that the child finds the engine's connections in order and can
// close its copies of them. Else peers would not see that the parent has died.
//
// Threads: constructor and destructor any; the rest on the thread that forks. Ends before the engine does. The copy in
// a child holds nothing still when the child forks.
#pragma once

#include <cstdint>
#include <memory>

#include "common/ownership.h"
#include "engine/process/process.h"
#include "engine/progress/progress.h"

namespace smddp::engine::progress {

// Returns how many forks lie between the process that first called countForks() and this one: 0 in the first process, 1
// in its children, 2 in their children. An engine that was made at another count is one of a parent. countForks()
// installs the handlers that count.
uint32_t countForks();
uint32_t forkCount();

class ForkHold {
 public:
  ForkHold(Ownership& ownership, Progress& progress, process::Process& process);
  ~ForkHold();
  ForkHold(const ForkHold&) = delete;
  ForkHold& operator=(const ForkHold&) = delete;

  // Stops the owner between two turns, or makes this thread the owner. Gives up after a second.
  void beforeFork() SMDDP_NO_THREAD_ANALYSIS;
  void afterForkInParent() SMDDP_NO_THREAD_ANALYSIS;
  void afterForkInChild() noexcept;

 private:
  struct Pause;

  Ownership& ownership_;
  Progress& progress_;
  process::Process& process_;
  const uint32_t forkCount_;
  // During a fork: whether this thread owns the engine; else the pause in which the owner waits.
  bool isOwner_ = false;
  std::shared_ptr<Pause> pause_;
};

}  // namespace smddp::engine::progress
