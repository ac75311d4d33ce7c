// Execution describes one collective for the checker: the plans of all ranks, and what the outputs must hold.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace smddp::plan {

struct Contribution {
  Rank rank = 0;
  int64_t offset = 0;  // in that rank's input
};

// The required contents of [offset, offset + length) of a rank's output: a copy of its one contribution, or
// the reduction of all of them, each exactly once.
struct Expectation {
  Rank rank = 0;
  int64_t offset = 0;
  int64_t length = 0;
  bool isReduction = false;  // true also for a reduction of one contribution, which is scaled
  std::vector<Contribution> contributions;
};

// One collective on all ranks.
struct Execution {
  std::vector<Plan> plans;  // by rank
  std::vector<int64_t> inputBytes;
  std::vector<int64_t> outputBytes;
  std::vector<bool> inPlace;  // input and output are the same buffer
  std::vector<Expectation> expectations;
  bool isBarrier = false;    // no rank may end before all ranks have begun
  bool hasOneOrder = false;  // all elements must be reduced in the same association
  int64_t elementBytes = 1;  // no step may begin or end inside an element

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

}  // namespace smddp::plan
