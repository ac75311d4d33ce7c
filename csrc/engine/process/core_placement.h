// Moves ranks of a node that wait for one another to different cores.
//
// The kernel leaves two processes on one core for seconds when each runs only while the other waits: neither of them
// waits long for the core. A collective then takes as long as the work of both, one after the other. So each process
// says in its control page on which core it runs. A thread that waits moves to another core if fewer of its mates run
// there. It keeps its set of allowed cores: whoever has pinned it decides, and the kernel may move it again.
#pragma once

#include <sched.h>

#include <optional>
#include <span>
#include <vector>

#include "common/clock.h"
#include "transport/shm/process_page.h"

namespace smddp::engine::process {

// The cores of `allowed` on which the fewest of `mates` run (their cores), unless `mine` is as good.
std::optional<cpu_set_t> coresWithFewestMates(const cpu_set_t& allowed, int mine,
                                              std::span<const int> mates);

// A process has one. The thread that owns the engine uses it, and is the thread that moves.
class CorePlacement {
 public:
  explicit CorePlacement(transport::shm::ProcessPage& page) : page_(page) {}

  // Says where this thread runs.
  void note() {
    const int core = sched_getcpu();
    if (page_.core.load(std::memory_order_relaxed) != core) {
      page_.core.store(core, std::memory_order_relaxed);
    }
  }
  // Moves this thread if that helps, and if it has not just been tried. `mates` are their control pages.
  void moveApart(std::span<const transport::shm::ProcessPage* const> mates, Nanoseconds now);

 private:
  transport::shm::ProcessPage& page_;
  Nanoseconds nextTry_ = 0;
};

}  // namespace smddp::engine::process
