// Small correct plans, and the same plans with one mistake each.
#pragma once

#include <vector>

#include "plan/builder.h"

namespace smddp::plan {

using Nodes = std::vector<std::vector<Rank>>;

// nodes x local ranks, numbered node by node.
Nodes makeNodes(int nodes, int local);

// With these, vectors of some hundred bytes take many chunks.
Limits smallLimits();

enum class Mistake {
  None,
  MissingWait,        // the reduction does not wait for the mates' contributions
  SlotReusedEarly,    // a contribution is overwritten one chunk too early
  ContributionTwice,  // the first mate counts twice
  OrderOnOneRank,     // rank 1 sums in reverse
  SharedCounter,      // both stages raise the same counter
  NoArrival,          // the plan does not wait for the team's arrival
  NoPreScale,
  NoFinalScale,
  TooFewSignals,  // the last chunk is not signalled
  WriteMatesSlot,
  OutsideBuffer,
  MissingRelease,
  MissingFlush,      // the source of a put is overwritten while the put may be in flight
  ReadAfterRelease,  // harmless until the slot is used again
  LengthsDiffer,
  NoReceive,
  PostedTooEarly,  // a message may arrive where the network still reads
};

// One node: every rank copies every chunk to a slot and sums all slots.
std::vector<Plan> sumThroughSlots(const Nodes& nodes, const Limits& limits, int64_t bytes,
                                  Mistake mistake);

// Two nodes of one rank: each sends its input to the other and adds the input that it receives.
std::vector<Plan> sumByExchange(const Nodes& nodes, const Limits& limits, int64_t bytes,
                                Mistake mistake);

// One node, shared buffers: each rank sums its share of all buffers into all buffers.
std::vector<Plan> sumInPlace(const Nodes& nodes, const Limits& limits, int64_t bytes,
                             bool staysForMates);

// Two nodes of one rank: rank 0 sends its input from a slot.
std::vector<Plan> sendFromSlot(const Nodes& nodes, const Limits& limits, int64_t bytes,
                               Mistake mistake);

}  // namespace smddp::plan
