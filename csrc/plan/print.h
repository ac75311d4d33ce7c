// Plans as text, for people: what `python -m smddp.plan` shows and what errors quote.
#pragma once

#include <string>

#include "plan/plan.h"
#include "plan/topology.h"

namespace smddp::plan {

// What one execution of a plan costs its rank.
struct Totals {
  int64_t steps = 0;
  int64_t messages = 0;
  int64_t bytesPut = 0;
  int64_t bytesCopied = 0;   // written by copies
  int64_t bytesReduced = 0;  // read by reductions
};
Totals totals(const Plan& plan);

// The whole plan: pools, channels, lanes with their blocks, and the totals. `k` is the trip of a block, from 0;
// the messages of a channel are counted from 1.
std::string print(const Plan& plan, const Topology& topology);

// One step, its numbers as functions of the trip k: "copy slot staged[k%3] <- in[64k, +64)".
std::string printStep(const Plan& plan, const Step& step);

// The same step in one trip: "copy slot staged[1] <- in[256, +64)".
std::string printStepAt(const Plan& plan, const Step& step, int64_t trip);

}  // namespace smddp::plan
