// Settings with small limits: vectors of a few kilobytes take many chunks, the windows are always full, and a group
// fits into a small slab.
#pragma once

#include "common/config.h"

namespace smddp::test {

inline Settings smallSettings() {
  Settings settings;
  settings.chunkBytes = 1024;
  settings.fabricChunkBytes = 2048;
  settings.poolBytes = 16384;
  settings.oneShotBytes = 512;
  settings.fusionBytes = 512;
  return settings;
}

}  // namespace smddp::test
