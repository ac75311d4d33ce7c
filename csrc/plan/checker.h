// Proves that the plans of all ranks, run back to back, do what their collective demands.
//
// The plans are executed symbolically with vector clocks. Waits are >= on monotonic counters with one writer,
// so no step can disable another: one maximal run decides about deadlock for every interleaving, and
// happens-before is the same in each. Proved are
//
//   progress  every lane ends; a put needs credit, as it does at run time
//   order     no two accesses to the same bytes, one of them a write, are unordered: between lanes, between
//             ranks of a node, with puts under way, with the callers' own use of their buffers before and
//             after, and with the executions before and after
//   contents  every output element holds what Execution::expectations say, the same association on every
//             rank, scaled where it must be and nowhere else
//   form      the rules of plan.h that no type enforces
//
// Three executions in a row are needed to see the staging halves reused (they alternate).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/topology.h"

namespace smddp::plan {

struct Contribution {
  Rank rank = 0;
  int64_t offset = 0;  // in that rank's input
};

// What [offset, offset + length) of a rank's output must hold in the end: a copy of its one contribution, or
// the reduction of all of them, each exactly once.
struct Expectation {
  Rank rank = 0;
  int64_t offset = 0;
  int64_t length = 0;
  bool isReduction = false;  // also with one contribution: it is scaled
  std::vector<Contribution> contributions;
};

// One collective on all ranks.
struct Execution {
  std::vector<Plan> plans;  // by rank
  std::vector<int64_t> inputBytes;
  std::vector<int64_t> outputBytes;
  std::vector<bool> inPlace;  // input and output are the same buffer
  std::vector<Expectation> expectations;
  bool isBarrier = false;    // nobody may end before everybody has begun
  bool hasOneOrder = false;  // all elements must be reduced in the same association
  int64_t elementBytes = 1;  // nothing may be cut inside an element

  static Execution allReduce(std::vector<Plan> plans, int64_t bytes);
  static Execution broadcast(std::vector<Plan> plans, int64_t bytes, Rank root);
  // `bytes`: one rank's block.
  static Execution allGather(std::vector<Plan> plans, int64_t bytes);
  static Execution reduceScatter(std::vector<Plan> plans, int64_t bytes);
  static Execution barrier(std::vector<Plan> plans);
  static Execution reduce(std::vector<Plan> plans, int64_t bytes, Rank root);
  static Execution gather(std::vector<Plan> plans, int64_t bytes, Rank root);
  static Execution scatter(std::vector<Plan> plans, int64_t bytes, Rank root);
  static Execution allToAll(std::vector<Plan> plans, int64_t bytes);
};

struct Verdict {
  enum class Kind : uint8_t { Correct, Malformed, Deadlock, Race, WrongData };
  Kind kind = Kind::Correct;
  std::string problem;  // the first one found, with rank, stage and trip
  bool ok() const { return kind == Kind::Correct; }
};

// nodes: as for Topology. The executions run one after the other on every rank; ranks may be apart.
Verdict check(const std::vector<std::vector<Rank>>& nodes, const Limits& limits,
              std::span<const Execution> backToBack);

// The rules that concern a plan by itself or beside those of its peers, not its run. Empty: all are kept.
std::string findMalformation(const std::vector<std::vector<Rank>>& nodes, const Limits& limits,
                             const Execution& execution);

}  // namespace smddp::plan
