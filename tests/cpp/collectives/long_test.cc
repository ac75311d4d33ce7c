// The largest group that the checker proves: 16 nodes of 8 ranks, with the sizes of production. Half of the algorithms,
// the others with the next TEST_TURN.
#include <gtest/gtest.h>

#include "collectives/cases.h"

namespace smddp::collectives {
namespace {

Nodes largeGroup() {
  Nodes nodes(16);
  for (Rank r = 0; r < 128; ++r) nodes[static_cast<size_t>(r / 8)].push_back(r);
  return nodes;
}

std::vector<NamedAlgorithm> algorithmsBetweenNodes() {
  std::vector<NamedAlgorithm> able;
  for (const NamedAlgorithm& algorithm : allAlgorithms()) {
    if (!algorithm.oneNode) able.push_back(algorithm);
  }
  return able;
}

// A few chunks for each. With a block per rank the vector is 128 times as long; the ring sends every chunk 30 times.
int64_t bytesFor(const NamedAlgorithm& algorithm) {
  const BufferSizes sizes = buffersOf({algorithm.collective, 1}, 0, 128);
  if (sizes.inputBytes == 0) return 0;
  if (sizes.inputBytes + sizes.outputBytes > 2) return 100'004;
  if (algorithm.name == "recursive_doubling") return 8'196;
  return algorithm.name == "ring" ? 4'000'004 : 13'000'004;
}

class LargeGroup : public testing::TestWithParam<NamedAlgorithm> {};

TEST_P(LargeGroup, IsServedCorrectly) {
  Case c{GetParam(), largeGroup(), {}, bytesFor(GetParam()), 77, {}};
  auto sharings = sharingsOf(c.algorithm, c.nodes);
  // All nodes are equal, so it does not matter which of them share.
  sharings.pop_back();
  for (const auto& sharing : sharings) {
    c.sharedOnNode = sharing;
    const plan::Verdict verdict = checkRepeated(c, 3);
    ASSERT_TRUE(verdict.ok()) << c << "\n" << verdict.problem;
  }
}

INSTANTIATE_TEST_SUITE_P(All, LargeGroup, testing::ValuesIn(halfOf(algorithmsBetweenNodes())),
                         [](const auto& info) {
                           return fmt::format("{}_{}", toString(info.param.collective),
                                              info.param.name);
                         });

}  // namespace
}  // namespace smddp::collectives
