#include "plan/execution.h"

#include <utility>

namespace smddp::plan {
namespace {

Execution start(std::vector<Plan> plans, int64_t inputBytes, int64_t outputBytes, bool inPlace) {
  Execution e;
  e.inputBytes.assign(plans.size(), inputBytes);
  e.outputBytes.assign(plans.size(), outputBytes);
  e.inPlace.assign(plans.size(), inPlace);
  e.plans = std::move(plans);
  return e;
}

std::vector<Contribution> fromAll(Rank numRanks, int64_t offset) {
  std::vector<Contribution> all;
  for (Rank r = 0; r < numRanks; ++r) all.push_back({r, offset});
  return all;
}

}  // namespace

Execution Execution::allReduce(std::vector<Plan> plans, int64_t bytes) {
  Execution e = start(std::move(plans), bytes, bytes, true);
  const auto numRanks = static_cast<Rank>(e.plans.size());
  for (Rank r = 0; r < numRanks; ++r) {
    e.expectations.push_back({r, 0, bytes, true, fromAll(numRanks, 0)});
  }
  return e;
}

Execution Execution::broadcast(std::vector<Plan> plans, int64_t bytes, Rank root) {
  Execution e = start(std::move(plans), bytes, bytes, true);
  for (Rank r = 0; r < static_cast<Rank>(e.plans.size()); ++r) {
    e.expectations.push_back({r, 0, bytes, false, {{root, 0}}});
  }
  return e;
}

Execution Execution::allGather(std::vector<Plan> plans, int64_t bytes) {
  const auto numRanks = static_cast<Rank>(plans.size());
  Execution e = start(std::move(plans), bytes, bytes * numRanks, false);
  for (Rank r = 0; r < numRanks; ++r) {
    for (Rank from = 0; from < numRanks; ++from) {
      e.expectations.push_back({r, from * bytes, bytes, false, {{from, 0}}});
    }
  }
  return e;
}

Execution Execution::reduceScatter(std::vector<Plan> plans, int64_t bytes) {
  const auto numRanks = static_cast<Rank>(plans.size());
  Execution e = start(std::move(plans), bytes * numRanks, bytes, false);
  for (Rank r = 0; r < numRanks; ++r) {
    e.expectations.push_back({r, 0, bytes, true, fromAll(numRanks, r * bytes)});
  }
  return e;
}

Execution Execution::barrier(std::vector<Plan> plans) {
  Execution e = start(std::move(plans), 0, 0, true);
  e.isBarrier = true;
  return e;
}

Execution Execution::reduce(std::vector<Plan> plans, int64_t bytes, Rank root) {
  const auto numRanks = static_cast<Rank>(plans.size());
  Execution e = start(std::move(plans), bytes, 0, false);
  e.outputBytes[root] = bytes;
  e.inPlace[root] = true;
  e.expectations.push_back({root, 0, bytes, true, fromAll(numRanks, 0)});
  return e;
}

Execution Execution::gather(std::vector<Plan> plans, int64_t bytes, Rank root) {
  const auto numRanks = static_cast<Rank>(plans.size());
  Execution e = start(std::move(plans), bytes, 0, false);
  e.outputBytes[root] = bytes * numRanks;
  for (Rank from = 0; from < numRanks; ++from) {
    e.expectations.push_back({root, from * bytes, bytes, false, {{from, 0}}});
  }
  return e;
}

Execution Execution::scatter(std::vector<Plan> plans, int64_t bytes, Rank root) {
  const auto numRanks = static_cast<Rank>(plans.size());
  Execution e = start(std::move(plans), 0, bytes, false);
  e.inputBytes[root] = bytes * numRanks;
  for (Rank r = 0; r < numRanks; ++r) {
    e.expectations.push_back({r, 0, bytes, false, {{root, r * bytes}}});
  }
  return e;
}

Execution Execution::allToAll(std::vector<Plan> plans, int64_t bytes) {
  const auto numRanks = static_cast<Rank>(plans.size());
  Execution e = start(std::move(plans), bytes * numRanks, bytes * numRanks, false);
  for (Rank to = 0; to < numRanks; ++to) {
    for (Rank from = 0; from < numRanks; ++from) {
      e.expectations.push_back({to, from * bytes, bytes, false, {{from, to * bytes}}});
    }
  }
  return e;
}

}  // namespace smddp::plan
