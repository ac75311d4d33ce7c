// Which algorithm serves a request: one table, readable by people, and a way to overrule it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/collective.h"
#include "collectives/tuning.h"

namespace smddp::collectives {

struct Choice {
  const char* name;
  Algorithm build;
  // Some rank does more before the arrival than to arrive. Then it cannot be chosen afterwards (Shape::late).
  bool copiesFirst = false;
};

// The first row of the table that serves the request, unless `overrides` says otherwise, or else
// `tuning`. Follows from its arguments alone, so that all ranks choose alike.
//
// overrides: collective=name[,...], for example "allreduce=ring,broadcast=chain". A collective may
// be named several times: the first of its algorithms that can serve the request is taken. Throws
// Usage when a name is unknown, or when a collective is overridden and none of its algorithms can
// serve the request; the text says where the overrides were written.
const Choice& select(const plan::Topology& topology, const plan::Limits& limits, const Shape& shape,
                     int64_t oneShotBytes, const std::string& overrides,
                     const char* origin = "SMDDP_ALGORITHM", const Tuning& tuning = {});

// Throws what select() would throw for names that are unknown, before there is a request.
void checkOverrides(const std::string& overrides, const char* origin = "SMDDP_ALGORITHM");

struct AlgorithmInfo {
  Collective collective;
  std::string name;
  std::string serves;  // which requests it can serve
  std::string chosen;  // for which of them the table takes it
};

// The names that a collective's algorithms have, in the order of the table.
std::vector<std::string> algorithmsOf(Collective collective);

// The table, in its order.
std::vector<AlgorithmInfo> listAlgorithms();

}  // namespace smddp::collectives
