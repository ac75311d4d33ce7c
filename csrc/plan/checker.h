// The checker proves that the plans of all ranks, run back to back, do what their collective demands.
//
// It executes the plans symbolically, with vector clocks. A wait is a >= on a monotonic counter with one writer, so
// no step can disable another one. Therefore one run, continued until no lane can go on, decides about deadlock for
// every interleaving, and happens-before is the same in each. It proves
//
//   progress  Every lane ends. A put needs credit, as at run time.
//   order     Two accesses to the same bytes are ordered if one of them is a write. This covers lanes, ranks of a
//             node, puts in flight, the callers' own use of their buffers before and after the call, and the
//             executions before and after.
//   contents  Every output element holds what Execution::expectations says, reduced in the same association on
//             every rank, and scaled where it must be and nowhere else.
//   form      The rules of plan.h that no type enforces (plan/malformation.h).
//
// Plans that post messages run twice: once all messages arrive in their slots, once where they are posted. No third run
// is needed for some of each: a conflict has two accesses, and each of the two runs has those of a message alone.
//
// It takes three executions in a row to see the staging halves reused, because halves alternate.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plan/execution.h"
#include "plan/plan.h"

namespace smddp::plan {

struct Verdict {
  enum class Kind : uint8_t { Correct, Malformed, Deadlock, Race, WrongData };
  Kind kind = Kind::Correct;
  std::string problem;  // the first one found, with rank, stage and trip
  bool ok() const { return kind == Kind::Correct; }
};

// nodes: as for Topology. Every rank runs the executions one after the other; one rank may be ahead of another.
Verdict check(const std::vector<std::vector<Rank>>& nodes, const Limits& limits,
              std::span<const Execution> backToBack);

}  // namespace smddp::plan
