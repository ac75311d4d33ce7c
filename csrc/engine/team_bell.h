// Wakes the ranks of our node that sleep, when we have signalled something.
//
// A ring costs a full fence: it waits until our stores have gone to the others' caches. Whoever comes last and finds the
// mates awake need not wait for that, so a signal only says that a ring is due. It is rung before this rank begins
// anything that takes long, and at the end of every turn.
//
// Used by the thread that owns the engine.
#pragma once

#include <vector>

#include "engine/process.h"

namespace smddp::engine {

class TeamBell {
 public:
  void add(Peer& mate) { mates_.push_back(&mate); }
  void signalled() { due_ = true; }
  void ring() {
    if (!due_) return;
    due_ = false;
    for (const Peer* mate : mates_) transport::shm::Doorbell::ring(*mate->mate);
  }

 private:
  std::vector<Peer*> mates_;
  bool due_ = false;
};

}  // namespace smddp::engine
