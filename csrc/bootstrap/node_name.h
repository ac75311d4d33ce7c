// Which processes may try to share memory: those with equal node names.
#pragma once

#include <string>

#include "common/config.h"

namespace smddp::bootstrap {

inline constexpr size_t kMaxNodeNameBytes = 192;

// SMDDP_NODE_ID if set ("id:…"), else what this kernel and its namespaces are ("boot:…"), so that a
// chosen name never equals a probed one. Mates open each other's memory through /proc/<pid>/fd:
// that needs the same PID namespace and a user namespace that grants it. A process that cannot read
// its own namespaces gets a name of its own and shares with nobody.
std::string nodeName(const Settings& settings);

// Whether the user chose the name.
bool isChosenNodeName(const std::string& name);

}  // namespace smddp::bootstrap
