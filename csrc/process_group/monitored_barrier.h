// The barrier that knows which ranks are missing: every rank sends rank 0 a message, and rank 0 answers all of them.
//
// Blocks the caller; one object serves one call. Holds references to engine and group. When a rank does not come, rank
// 0 makes the group fail with an error that names it, which every rank throws.
#pragma once

#include <memory>

#include "engine/calls/completion.h"
#include "engine/engine.h"

namespace smddp::process_group {

class MonitoredBarrier {
 public:
  MonitoredBarrier(std::shared_ptr<engine::Engine> engine,
                   std::shared_ptr<engine::groups::Group> group);
  // waitAllRanks: rank 0 waits for all ranks, instead of giving up at the first that does not come.
  void run(Nanoseconds timeout, bool waitAllRanks) const;

 private:
  // A byte that arrives says that its sender has come, or that its receiver may go.
  engine::calls::CompletionPtr signal(bool send, Rank rank, int32_t tag, Nanoseconds timeout) const;
  // Rank 0 calls the first, the others the second.
  void awaitRanks(Nanoseconds timeout, bool all) const;
  void awaitRelease(Nanoseconds timeout) const;

  const std::shared_ptr<engine::Engine> engine_;
  const std::shared_ptr<engine::groups::Group> group_;
};

}  // namespace smddp::process_group
