// Happens-before between the lanes of all ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace smddp::plan {

// One moment of one lane. Time 0 precedes everything.
struct Epoch {
  uint32_t thread = 0;
  uint32_t time = 0;
};

// The progress of every other lane, as far as one lane knows it. A copy is a snapshot. It only increments a reference
// count; the first join() afterwards copies the vector. Not thread-safe.
class VectorClock {
 public:
  VectorClock() = default;
  VectorClock(size_t numThreads, uint32_t me)
      : known_(std::make_shared<std::vector<uint32_t>>(numThreads, 0)), now_{me, 0} {}

  void tick() { ++now_.time; }
  Epoch now() const { return now_; }

  bool includes(Epoch e) const {
    return e.time <= (e.thread == now_.thread ? now_.time : (*known_)[e.thread]);
  }

  void join(const VectorClock& other) {
    // A clock that includes the other's last moment includes all that the other knew then.
    if (includes(other.now_)) return;
    if (known_.use_count() > 1) known_ = std::make_shared<std::vector<uint32_t>>(*known_);
    uint32_t* mine = known_->data();
    const uint32_t* theirs = other.known_->data();
    for (size_t i = 0; i < known_->size(); ++i) mine[i] = std::max(mine[i], theirs[i]);
    mine[other.now_.thread] = std::max(mine[other.now_.thread], other.now_.time);
  }

 private:
  std::shared_ptr<std::vector<uint32_t>> known_;  // its entry for this lane is stale; see now_
  Epoch now_;
};

}  // namespace smddp::plan
