// Different plans one after the other, as a program issues them: a plan must not harm the next one.
#include <algorithm>
#include <random>
#include <sstream>

#include <gtest/gtest.h>

#include "collectives/cases.h"
#include "support/effort.h"

namespace smddp::collectives {
namespace {

// A random group of up to 6 nodes with up to 4 ranks, in a random order.
Nodes randomNodes(std::mt19937_64& random) {
  std::vector<size_t> sizes(1 + random() % 6);
  for (size_t& size : sizes) size = 1 + random() % 4;
  std::vector<size_t> nodeOfRank;
  for (size_t n = 0; n < sizes.size(); ++n) nodeOfRank.insert(nodeOfRank.end(), sizes[n], n);
  std::shuffle(nodeOfRank.begin(), nodeOfRank.end(), random);
  std::vector<std::string> names;
  for (size_t node : nodeOfRank) names.push_back(std::to_string(node));
  return plan::Topology::fromNames(names, 0).nodes();
}

plan::Limits randomLimits(std::mt19937_64& random) {
  const auto granules = [&](int64_t most) {
    return plan::kGranule * (1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most)));
  };
  return {.chunkBytes = granules(8) + static_cast<int64_t>(random() % 64),
          .fabricChunkBytes = granules(16),
          .messageBytes = granules(8) + static_cast<int64_t>(random() % 64),
          .window = 1 + static_cast<int64_t>(random() % 5),
          .halfBytes = granules(256) + (16 << 10)};
}

Case randomCase(std::mt19937_64& random, const Nodes& nodes, const plan::Limits& limits) {
  const auto& algorithms = allAlgorithms();
  NamedAlgorithm algorithm = algorithms[random() % algorithms.size()];
  while (!algorithm.serves(nodes)) algorithm = algorithms[random() % algorithms.size()];
  Rank numRanks = 0;
  for (const auto& node : nodes) numRanks += static_cast<Rank>(node.size());
  Case c{algorithm, nodes, limits, 0, 0, {}};
  const uint64_t most = random() % 2 == 0 ? 40 : 700;
  if (algorithm.collective != Collective::Barrier) {
    c.bytes = static_cast<int64_t>(random() % most) * kElementBytes;
    c.root = static_cast<Rank>(random() % static_cast<uint64_t>(numRanks));
  }
  for (size_t n = 0; n < nodes.size(); ++n) {
    c.sharedOnNode.push_back(algorithm.needsShared || random() % 2 == 0);
  }
  return c;
}

TEST(Sequences, OfRandomPlansAreCorrect) {
  const test::Share share = test::shareUnderSanitizers();
  for (uint64_t seed = 1 + share.first; seed <= 400; seed += share.step) {
    std::mt19937_64 random(seed);
    const Nodes nodes = randomNodes(random);
    const plan::Limits limits = randomLimits(random);
    std::vector<plan::Execution> executions;
    std::ostringstream told;
    const size_t length = 2 + random() % 5;
    for (size_t i = 0; i < length; ++i) {
      const Case c = randomCase(random, nodes, limits);
      told << c << "\n";
      executions.push_back(c.execution());
    }
    const plan::Verdict verdict = plan::check(nodes, limits, executions);
    ASSERT_TRUE(verdict.ok()) << "seed " << seed << "\n" << told.str() << verdict.problem;
  }
}

}  // namespace
}  // namespace smddp::collectives
