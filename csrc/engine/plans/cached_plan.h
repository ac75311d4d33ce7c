// A plan as the cache of a group keeps it. It does not change, so it holds for every execution.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace smddp::engine::plans {

// A plan, and what is derived from it once, for the executor, the channels and statistics.
struct CachedPlan {
  explicit CachedPlan(plan::Plan plan);
  plan::Plan plan;
  std::vector<uint16_t> channelOfStep;  // index into plan.channels; kNone where there is none
  std::vector<uint16_t> channelOfRef;
  // By channel: the longest message in either direction. The plan of the rank at the other end finds the same.
  std::vector<int64_t> longestMessage;
  int64_t putBytes = 0;      // sent to other nodes by one execution
  int64_t receiveBytes = 0;  // received from them
  int64_t memoryBytes = 0;   // read by its copies and reductions
  bool putsStaging = false;  // some of what it sends lies in staging memory
  bool fitsNear = true;      // its slots find room in Arrival::near
  // The heap memory that the plan takes beside this object.
  size_t heapBytes() const;
  static constexpr uint16_t kNone = 0xffff;
};

}  // namespace smddp::engine::plans
