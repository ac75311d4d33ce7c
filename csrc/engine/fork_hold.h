// Holds an engine still around a fork of its process, so that the child finds the engine's connections in order and can
// close its copies of them: else peers would not see that the parent has died.
//
// Threads: constructor and destructor any; the rest on the thread that forks. Ends before the engine does. A child of a
// fork has a copy that does nothing.
#pragma once

#include <cstdint>
#include <memory>

#include "common/ownership.h"
#include "engine/process.h"
#include "engine/progress.h"

namespace smddp::engine {

// How often this process and its ancestors have forked since countForks() was first called: an engine made at another
// count is its parent's.
uint32_t countForks();
uint32_t forkCount();

class ForkHold {
 public:
  ForkHold(Ownership& ownership, Progress& progress, Process& process);
  ~ForkHold();
  ForkHold(const ForkHold&) = delete;
  ForkHold& operator=(const ForkHold&) = delete;

  // The owner comes to a stop, or this thread becomes the owner. Gives up after a second.
  void beforeFork() SMDDP_NO_THREAD_ANALYSIS;
  void afterForkInParent() SMDDP_NO_THREAD_ANALYSIS;
  void afterForkInChild() noexcept;

 private:
  struct Pause;

  Ownership& ownership_;
  Progress& progress_;
  Process& process_;
  const uint32_t forkCount_;
  // Of the fork under way: this thread owns the engine, or its owner waits in a pause.
  bool isOwner_ = false;
  std::shared_ptr<Pause> pause_;
};

}  // namespace smddp::engine
