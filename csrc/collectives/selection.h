// Selects the algorithm for a request: one table, and the ways to override it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/collective.h"
#include "collectives/tuning.h"

namespace smddp::collectives {

// How much an algorithm copies before all ranks have arrived.
enum class Preamble : uint8_t {
  NoCopy,  // only the arrival signal and the wait. An algorithm that only serves shared buffers must have this
  CopyIn,  // some rank copies, so the algorithm cannot be chosen after the arrival (Shape::afterArrival)
  OneShot,  // every rank copies once; when all have arrived each makes one sum, and that is all
};

struct Choice {
  const char* name;
  Algorithm build;
  Preamble preamble = Preamble::NoCopy;
};

// Returns the algorithm that `overrides` names for the collective; else the one of the first row of `tuning` that
// fits; else the one of the first row of the table that fits. A pure function, so that all ranks choose alike.
//
// overrides: collective=name[,...], for example "allreduce=ring,broadcast=chain". A collective may be named several
// times: the first of its algorithms that can serve the request is taken. Throws Usage if a name is unknown, or if a
// collective is overridden and none of the named algorithms can serve the request. `origin` says in the error where
// the overrides were written.
//
// find() returns null where select() throws because none of the named algorithms can serve the request.
const Choice* find(const plan::Topology& topology, const plan::Limits& limits, const Shape& shape,
                   int64_t oneShotBytes, const std::string& overrides, const char* origin,
                   const Tuning& tuning);
const Choice& select(const plan::Topology& topology, const plan::Limits& limits, const Shape& shape,
                     int64_t oneShotBytes, const std::string& overrides,
                     const char* origin = "SMDDP_ALGORITHM", const Tuning& tuning = {});

// The wire format of a call that is to travel as `wanted`: fp32 inside a node, for short vectors, and for collectives
// that sum nothing.
Wire encodedAs(const plan::Topology& topology, Collective collective, int64_t bytes, Wire wanted);

// Whether sums may travel in other formats than fp32: the overrides name an algorithm for the collective that knows
// them, or they name none. Throws Usage for unknown names.
bool knowsFormats(Collective collective, const std::string& overrides,
                  const char* origin = "SMDDP_ALGORITHM");

// Throws Usage for unknown names, as select() would. For a check before there is a request.
void checkOverrides(const std::string& overrides, const char* origin = "SMDDP_ALGORITHM");

struct AlgorithmInfo {  // a row of the table as text
  Collective collective;
  std::string name;
  std::string serves;  // the requests that it can serve
  std::string chosen;  // those of them for which the table selects it
};

// The names of a collective's algorithms, in the order of the table.
std::vector<std::string> algorithmsOf(Collective collective);

// The table, in its order.
std::vector<AlgorithmInfo> listAlgorithms();

}  // namespace smddp::collectives
