// The one engine of a process, which all programs in it share: torch's process groups and users of the C interface.
#pragma once

#include <memory>

#include "engine/engine.h"

namespace smddp::engine {

// The first call makes it, with its settings; later calls return the same engine. Only shutdownSharedEngine() ends it:
// when destructors of static objects run, its threads and an interpreter that it calls may be gone. In the child of a
// fork whose parent had left all groups, the first call makes another one. Throws what the Engine's constructor throws.
// [thread-safe]
std::shared_ptr<Engine> sharedEngine(const Settings& settings);
// Leaves all groups. Called when the program ends; afterwards every call on a group fails. [thread-safe]
void shutdownSharedEngine();

}  // namespace smddp::engine
