// Plans of the real algorithms with one mistake each: the checker must find most of them. Half of the algorithms, the
// others with the next TEST_TURN.
//
// Some steps can be removed without harm. They exist because a plan is the same for every chunk and every group:
// signals for which only a later chunk would wait; waits that the wait of a later chunk covers; flushes of puts whose
// receiver has answered since (the transport still needs them, because it may still use the source); releases if fewer
// chunks are in flight than the window holds; steps on empty shares.
#include "plan/mutation.h"

#include <sstream>

#include <gtest/gtest.h>

#include "collectives/cases.h"

namespace smddp::collectives {
namespace {

class Mutations : public testing::TestWithParam<NamedAlgorithm> {};

TEST_P(Mutations, AreFound) {
  int tried = 0, found = 0;
  std::string alive;
  for (const Nodes& nodes : {Nodes{{0, 1}}, Nodes{{0, 3}, {1, 2, 4}}, Nodes{{0}, {1}, {2}}}) {
    if (!GetParam().serves(nodes)) continue;
    for (const bool shared : {true, false}) {
      if (GetParam().needsShared && !shared) continue;
      Case c{GetParam(), nodes, smallLimits(2), 0, 1, std::vector<bool>(nodes.size(), shared)};
      // Long enough that slots are reused several times and the last chunk has work for all.
      if (c.algorithm.collective != Collective::Barrier) c.bytes = 3524;
      const auto report = plan::checkMutations(nodes, c.limits, c.execution());
      tried += report.tried;
      found += report.found;
      std::ostringstream told;
      told << c << "\n" << report.print();
      alive += told.str();
    }
  }
  EXPECT_GT(tried, 0);
  EXPECT_GT(found, 0.85 * tried) << alive;
}

INSTANTIATE_TEST_SUITE_P(All, Mutations, testing::ValuesIn(halfOf(allAlgorithms())),
                         [](const auto& info) {
                           return fmt::format("{}_{}", toString(info.param.collective),
                                              info.param.name);
                         });

}  // namespace
}  // namespace smddp::collectives
