// What algorithms may count on, as the settings have it. Equal on all ranks: bootstrap compares the settings.
#pragma once

#include <algorithm>

#include "common/config.h"
#include "plan/plan.h"

namespace smddp::engine {

inline plan::Limits limitsFromSettings() {
  plan::Limits limits;
  limits.chunkBytes = settings().chunkBytes;
  limits.fabricChunkBytes = settings().fabricChunkBytes;
  // Windows have room for the longest message, and none need be longer than a chunk.
  limits.messageBytes = std::min(limits.messageBytes, limits.fabricChunkBytes);
  limits.window = settings().fabricWindow;
  limits.halfBytes = settings().poolBytes;
  return limits;
}

}  // namespace smddp::engine
