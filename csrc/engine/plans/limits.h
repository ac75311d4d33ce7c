// The limits of plans, from the settings. They are equal on all ranks: bootstrap compares the settings.
#pragma once

#include <algorithm>

#include "common/config.h"
#include "plan/builder.h"

namespace smddp::engine::plans {

inline plan::Limits limitsFrom(const Settings& settings) {
  plan::Limits limits;
  limits.chunkBytes = settings.chunkBytes;
  limits.fabricChunkBytes = settings.fabricChunkBytes;
  // Slots of windows have room for the longest message, and no message need be longer than a chunk.
  limits.messageBytes = std::min(limits.messageBytes, limits.fabricChunkBytes);
  limits.window = settings.fabricWindow;
  // SMDDP_POOL_BYTES is the size of a half, which holds all pools of a plan. Slots begin at whole granules, so a rest
  // would have no room for the end of the longest vector.
  limits.halfBytes = settings.poolBytes / plan::kGranule * plan::kGranule;
  return limits;
}

}  // namespace smddp::engine::plans
