// Which engines of this process are to be held still around a fork.
//
// Threads: any. All of the process; for ever.
#pragma once

#include <cstdint>

namespace smddp::engine {

class Engine;

// How often this process and its ancestors have forked since they watch: an engine made at another count is its
// parent's.
uint32_t watchForks();  // from now on
uint32_t forkGeneration();

void enroll(Engine* engine);
void strike(Engine* engine);

}  // namespace smddp::engine
