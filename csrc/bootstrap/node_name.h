// Node names. Processes with equal names may try to share memory.
#pragma once

#include <string>

#include "common/config.h"

namespace smddp::bootstrap {

inline constexpr size_t kMaxNodeNameBytes = 192;

// Returns SMDDP_NODE_ID if set ("id:…"), else the identity of this kernel and its namespaces ("boot:…"). The prefixes
// keep a chosen name from being equal to the other kind. Mates open each other's memory through /proc/<pid>/fd, which
// needs the same PID namespace and a user namespace that allows it. A process that cannot read its own namespaces gets
// a unique name, and shares memory with nobody.
std::string nodeName(const Settings& settings);

// True if the user chose the name.
bool isChosenNodeName(const std::string& name);

}  // namespace smddp::bootstrap
