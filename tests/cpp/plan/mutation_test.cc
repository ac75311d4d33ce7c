#include "plan/mutation.h"

#include <gtest/gtest.h>

#include "plan/example_plans.h"

namespace smddp::plan {
namespace {

void expectMostFound(const Nodes& nodes, const Execution& execution, int least) {
  const MutationReport report = checkMutations(nodes, smallLimits(), execution);
  EXPECT_GE(report.tried, least);
  EXPECT_EQ(report.tried, report.found + static_cast<int>(report.survivors.size()));
  EXPECT_GT(report.share(), 0.85) << report.print();
}

TEST(Mutation, CheckerFindsMostInNodePlans) {
  const Nodes nodes = makeNodes(1, 3);
  const int64_t bytes = 6 * 128 + 36;
  expectMostFound(
      nodes,
      Execution::allReduce(sumThroughSlots(nodes, smallLimits(), bytes, Mistake::None), bytes),
      100);
  expectMostFound(nodes, Execution::allReduce(sumInPlace(nodes, smallLimits(), bytes, true), bytes),
                  20);
}

TEST(Mutation, CheckerFindsMostInExchanges) {
  const Nodes nodes = makeNodes(2, 1);
  const int64_t bytes = 6 * 128 + 36;
  expectMostFound(
      nodes, Execution::allReduce(sumByExchange(nodes, smallLimits(), bytes, Mistake::None), bytes),
      40);
  expectMostFound(
      nodes, Execution::broadcast(sendFromSlot(nodes, smallLimits(), 128, Mistake::None), 128, 0),
      15);
}

TEST(Mutation, SurvivorsAreNamed) {
  // Rank 1 does not read the data, so rank 0 need not signal that it is complete.
  const Nodes nodes = makeNodes(1, 2);
  std::vector<Plan> plans;
  for (Rank r = 0; r < 2; ++r) {
    Builder b(Topology(nodes, r), smallLimits(), "needless signal");
    b.arrive();
    b.stage("only");
    b.signal(1, 1);
    plans.push_back(b.done());
  }
  const MutationReport report = checkMutations(nodes, smallLimits(), Execution::barrier(plans));
  EXPECT_LT(report.share(), 1);
  EXPECT_NE(report.print().find("alive: rank 0, stage only, signal c1 = 1: removed"),
            std::string::npos)
      << report.print();
}

}  // namespace
}  // namespace smddp::plan
