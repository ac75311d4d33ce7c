// Wakes the ranks of our node that sleep, when we have signalled something.
//
// A ring costs a full fence, which waits until our stores are visible to the mates. The rank that arrives last, and
// finds its mates awake, need not wait for that. So signalled() only notes that a ring is due. ring() is called before
// this rank begins anything that takes long, and at the end of every turn.
//
// Used by the thread that owns the engine.
#pragma once

#include <vector>

#include "engine/process/process.h"

namespace smddp::engine::team {

class TeamBell {
 public:
  void add(process::Peer& mate) { mates_.push_back(&mate); }
  void signalled() { due_ = true; }
  void ring() {
    if (!due_) return;
    due_ = false;
    for (const process::Peer* mate : mates_) transport::shm::Doorbell::ring(*mate->mate);
  }

 private:
  std::vector<process::Peer*> mates_;
  bool due_ = false;
};

}  // namespace smddp::engine::team
