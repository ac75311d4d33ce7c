// Prints plans as text. `smddp plan` shows it, and errors quote steps.
#pragma once

#include <string>

#include "plan/plan.h"
#include "plan/topology.h"

namespace smddp::plan {

// The amount of work that one execution of a plan means for its rank.
struct Totals {
  int64_t steps = 0;
  int64_t messages = 0;
  int64_t bytesPut = 0;
  int64_t bytesCopied = 0;   // written by copies
  int64_t bytesReduced = 0;  // read by reductions
};
Totals totals(const Plan& plan);

// Prints the whole plan: pools, channels, lanes with their blocks, and the totals. `k` is the trip index of a block,
// from 0; the messages of a channel are counted from 1.
std::string print(const Plan& plan, const Topology& topology);

// Prints one step, with its numbers as functions of the trip k:
// "copy mate 0's staged slot k%3 [0, +64) <- in[64k, +64)".
std::string printStep(const Plan& plan, const Step& step);

// Prints the step as it is in one trip, here trip 4: "copy mate 0's staged slot 1 [0, +64) <- in[256, +64)".
std::string printStepAt(const Plan& plan, const Step& step, int64_t trip);

}  // namespace smddp::plan
