// Checks the rules of plan.h that concern the plans themselves, not their run.
#pragma once

#include <string>
#include <vector>

#include "plan/execution.h"
#include "plan/plan.h"

namespace smddp::plan {

// Returns the first rule that a plan breaks, by itself or together with the plans of the other ranks, as text. Empty
// if all rules are kept. nodes: as for Topology.
std::string findMalformation(const std::vector<std::vector<Rank>>& nodes, const Limits& limits,
                             const Execution& execution);

}  // namespace smddp::plan
