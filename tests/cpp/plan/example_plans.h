// Small plans that are right, and the same with one mistake each.
#pragma once

#include <vector>

#include "plan/builder.h"

namespace smddp::plan {

using Nodes = std::vector<std::vector<Rank>>;

// nodes x local ranks, numbered node by node.
Nodes makeNodes(int nodes, int local);

enum class Mistake {
  None,
  MissingWait,        // the reduction does not wait for the mates' contributions
  SlotReusedEarly,    // a contribution is replaced one chunk too soon
  ContributionTwice,  // the first mate counts twice
  OrderOnOneRank,     // rank 1 sums in reverse
  SharedCounter,      // both stages raise the same counter
  NoArrival,          // the arrival of the team is not awaited
  NoPreScale,
  NoFinalScale,
  TooFewSignals,  // the last chunk is never announced
  WriteMatesSlot,
  OutsideBuffer,
  MissingRelease,
  MissingFlush,      // the source of a put is overwritten while it may be under way
  ReadAfterRelease,  // harmless until the window comes round
  LengthsDiffer,
  NoReceive,
};

// One node: everybody copies every chunk to a slot and sums all slots.
std::vector<Plan> sumThroughSlots(const Nodes& nodes, const Limits& limits, int64_t bytes,
                                  Mistake mistake);

// Two nodes of one rank: each sends its input to the other and adds what comes.
std::vector<Plan> sumByExchange(const Nodes& nodes, const Limits& limits, int64_t bytes,
                                Mistake mistake);

// One node, shared buffers: each sums its share of everybody's buffer into everybody's buffer.
std::vector<Plan> sumInPlace(const Nodes& nodes, const Limits& limits, int64_t bytes,
                             bool staysForMates);

// Two nodes of one rank: rank 0 sends its input from a slot.
std::vector<Plan> sendFromSlot(const Nodes& nodes, const Limits& limits, int64_t bytes,
                               Mistake mistake);

}  // namespace smddp::plan
