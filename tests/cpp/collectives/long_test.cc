// The largest group that is proved: 16 nodes of 8 ranks, with the sizes of production.
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

class LargeGroup : public testing::TestWithParam<NamedAlgorithm> {};

TEST_P(LargeGroup, IsServedCorrectly) {
  Case c{GetParam(), largeGroup(), {}, 0, 77, {}};
  // Per-rank blocks make the vector 128 times as long; other algorithms are for tiny vectors.
  const int64_t vectors = buffersOf({c.algorithm.collective, 1, c.root}, c.root, 128).inputBytes +
                          buffersOf({c.algorithm.collective, 1, c.root}, c.root, 128).outputBytes;
  const bool isTiny = c.algorithm.name == "recursive_doubling";
  if (vectors > 0) c.bytes = isTiny ? 8'196 : vectors > 2 ? 100'004 : 13'000'004;
  for (const auto& sharing : sharingsOf(c.algorithm, c.nodes)) {
    c.sharedOnNode = sharing;
    const plan::Verdict verdict = checkRepeated(c, 3);
    ASSERT_TRUE(verdict.ok()) << c << "\n" << verdict.problem;
  }
}

INSTANTIATE_TEST_SUITE_P(All, LargeGroup, testing::ValuesIn(algorithmsBetweenNodes()),
                         [](const auto& info) {
                           return fmt::format("{}_{}", toString(info.param.collective),
                                              info.param.name);
                         });

}  // namespace
}  // namespace smddp::collectives
