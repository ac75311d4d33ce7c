// Mutation tests: makes one mistake in a plan, and checks that the checker finds it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "plan/checker.h"

namespace smddp::plan {

// Calls `visit` with every mutation of the plans. A mutation removes a wait, signal, put, receive, release or flush, or
// weakens its number by one; moves a signal or release before the step that it announces; exchanges a slot or message
// with its neighbour, or its owner with another rank; drops a source of a reduction; shifts a residual; or flips a
// scaling. Each is made on one rank alone, and on all ranks that have the same step at the same place. Waits for a team
// of one are left out, because they have no effect.
void forEachMutation(
    const std::vector<std::vector<Rank>>& nodes, const std::vector<Plan>& plans,
    const std::function<void(const std::string& what, std::vector<Plan> mutated)>& visit);

struct MutationReport {
  int tried = 0;
  int found = 0;
  std::vector<std::string> survivors;  // some are harmless; a person must judge them
  double share() const { return tried == 0 ? 0 : static_cast<double>(found) / tried; }
  std::string print() const;
};

// Checks each mutation of the execution's plans, run `times` times back to back.
MutationReport checkMutations(const std::vector<std::vector<Rank>>& nodes, const Limits& limits,
                              const Execution& execution, int times = 3);

}  // namespace smddp::plan
