// Plans with one mistake each: does the checker find it?
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "plan/checker.h"

namespace smddp::plan {

// Calls `visit` with every mutation of the plans: a wait, signal, put, receive, release or flush removed, or its
// number off by one to the weak side; a signal or release moved before what it announces; a slot or message
// exchanged with its neighbour, or its owner with another; a source of a reduction dropped; a scaling
// flipped. Each on one rank alone, and on all ranks that have the same step at the same place. Waits for a
// team of one are left out: they mean nothing.
void forEachMutation(
    const std::vector<std::vector<Rank>>& nodes, const std::vector<Plan>& plans,
    const std::function<void(const std::string& what, std::vector<Plan> mutated)>& visit);

struct MutationReport {
  int tried = 0;
  int found = 0;
  std::vector<std::string> survivors;  // some are harmless: read them
  double share() const { return tried == 0 ? 0 : static_cast<double>(found) / tried; }
  std::string print() const;
};

// Checks each mutation of the execution's plans, run `times` times back to back.
MutationReport checkMutations(const std::vector<std::vector<Rank>>& nodes, const Limits& limits,
                              const Execution& execution, int times = 3);

}  // namespace smddp::plan
