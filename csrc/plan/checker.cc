#include "plan/checker.h"

#include <algorithm>
#include <utility>

#include "plan/malformation.h"
#include "plan/symbolic_run.h"

namespace smddp::plan {

Verdict check(const std::vector<std::vector<Rank>>& nodes, const Limits& limits,
              std::span<const Execution> backToBack) {
  for (const Execution& execution : backToBack) {
    std::string problem = findMalformation(nodes, limits, execution);
    if (!problem.empty()) return {Verdict::Kind::Malformed, std::move(problem)};
  }
  const Verdict verdict = SymbolicRun(nodes, limits, backToBack, false).go();
  const bool hasPosts = std::ranges::any_of(backToBack, [](const Execution& execution) {
    return std::ranges::any_of(execution.plans, [](const Plan& plan) {
      return std::ranges::any_of(plan.steps, [](const Step& s) { return s.op == Op::Post; });
    });
  });
  if (!hasPosts || !verdict.ok()) return verdict;
  return SymbolicRun(nodes, limits, backToBack, true).go();
}

}  // namespace smddp::plan
