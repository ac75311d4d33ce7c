#include "plan/checker.h"

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
  return SymbolicRun(nodes, limits, backToBack).go();
}

}  // namespace smddp::plan
