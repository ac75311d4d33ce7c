// The checker proves every algorithm on a grid of groups, sizes and kinds of memory.
#include <numeric>
#include <tuple>

#include <gtest/gtest.h>

#include "collectives/cases.h"
#include "support/effort.h"

namespace smddp::collectives {
namespace {

// Nodes of equal and of different size, nodes of one rank, and ranks that are not in the order of nodes.
const std::vector<Nodes> kGroups = {
    {{0}},
    {{0, 1}},
    {{0, 1, 2}},
    {{0, 1, 2, 3}},
    {{0}, {1}},
    {{0, 1}, {2, 3}},
    {{0, 2}, {1, 3}},
    {{0, 1, 2}, {3}},
    {{0, 3, 4}, {1, 2}},
    {{0}, {1}, {2}},
    {{0, 1}, {2, 3}, {4, 5}},
    {{0, 4}, {1, 2, 6, 7}, {3, 5, 8}},
    {{0, 1, 2, 3, 4}, {5, 6}},
    {{0}, {1}, {2}, {3}},
    {{0, 1}, {2, 3}, {4, 5}, {6, 7}},
    {{0}, {1, 2}, {3}, {4}, {5}},
    {{0, 7}, {1}, {2, 5, 8}, {3}, {4}, {6}, {9}},
    {{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}},
};

int64_t numRanksOf(const Nodes& nodes) {
  int64_t count = 0;
  for (const auto& node : nodes) count += static_cast<int64_t>(node.size());
  return count;
}

// No element, one element, about one for each rank, odd counts, one granule more or less, full chunks with a shorter
// last one.
std::vector<int64_t> sizesFor(const NamedAlgorithm& algorithm, const Nodes& nodes) {
  if (algorithm.collective == Collective::Barrier) return {0};
  const int64_t n = numRanksOf(nodes);
  std::vector<int64_t> sizes;
  for (int64_t elements : {int64_t{0}, int64_t{1}, n - 1, n + 1, int64_t{15}, int64_t{17},
                           16 * n - 1, 16 * n + 3, int64_t{257}, int64_t{1003}}) {
    sizes.push_back(elements * kElementBytes);
  }
  return sizes;
}

class Algorithms : public testing::TestWithParam<NamedAlgorithm> {
 protected:
  // Calls visit(case) for all groups and kinds of memory, or a share of them.
  template <typename Visit>
  void forEachGroup(const plan::Limits& limits, Visit visit) {
    const test::Share share = test::shareUnderSanitizers();
    uint64_t number = 0;
    for (const Nodes& nodes : kGroups) {
      if (!GetParam().serves(nodes)) continue;
      for (const auto& sharing : sharingsOf(GetParam(), nodes)) {
        if (share.has(number++)) visit(Case{GetParam(), nodes, limits, 0, 0, sharing});
      }
    }
  }
};

TEST_P(Algorithms, AreCorrectOnEveryGroupAndSize) {
  forEachGroup(smallLimits(2), [](Case c) {
    for (int64_t bytes : sizesFor(c.algorithm, c.nodes)) {
      c.bytes = bytes;
      c.root = static_cast<Rank>(bytes % numRanksOf(c.nodes));
      const plan::Verdict verdict = checkRepeated(c, 1);
      ASSERT_TRUE(verdict.ok()) << c << "\n" << verdict.problem;
    }
  });
}

TEST_P(Algorithms, MayFollowThemselves) {
  for (int64_t window : {1, 3}) {
    forEachGroup(smallLimits(window), [](Case c) {
      for (int64_t bytes : {int64_t{4}, int64_t{1500}}) {
        if (c.algorithm.collective != Collective::Barrier) c.bytes = bytes;
        const plan::Verdict verdict = checkRepeated(c, 3);
        ASSERT_TRUE(verdict.ok()) << c << "\n" << verdict.problem;
      }
    });
  }
}

TEST_P(Algorithms, PassManyChunks) {
  plan::Limits limits = smallLimits(4);
  limits.chunkBytes = limits.fabricChunkBytes = limits.messageBytes = plan::kGranule;
  forEachGroup(limits, [](Case c) {
    if (c.algorithm.collective != Collective::Barrier) c.bytes = 5500;
    const plan::Verdict verdict = checkRepeated(c, 1);
    ASSERT_TRUE(verdict.ok()) << c << "\n" << verdict.problem;
  });
}

// More ranks of one node than a byte can count.
TEST_P(Algorithms, ServeNodesOfManyRanks) {
  constexpr Rank kMany = 257;
  Nodes nodes{std::vector<Rank>(kMany)};
  std::iota(nodes[0].begin(), nodes[0].end(), 0);
  if (!GetParam().oneNode) nodes.push_back({kMany});
  Case c{GetParam(), nodes, {}, 0, 0, std::vector<bool>(nodes.size(), true)};
  const BufferSizes sizes = buffersOf({c.algorithm.collective, 1}, 0, kMany);
  if (sizes.inputBytes + sizes.outputBytes > 0) c.bytes = 4;
  if (sizes.inputBytes + sizes.outputBytes == 2) c.bytes = 4 * kMany;
  const plan::Verdict verdict = checkRepeated(c, 1);
  EXPECT_TRUE(verdict.ok()) << c.algorithm << "\n" << verdict.problem;
}

// Only the number of trips may grow with the vector; a shorter last chunk adds a few steps.
TEST_P(Algorithms, HaveSmallPlansForAnyVector) {
  forEachGroup(plan::Limits{}, [](Case c) {
    const bool isWhole = c.algorithm.name == "one_shot" || c.algorithm.name == "recursive_doubling";
    if (c.algorithm.collective == Collective::Barrier || isWhole) return;
    const plan::Topology t(c.nodes, 0);
    const auto stepsFor = [&](int64_t bytes) {
      const Shape shape{c.algorithm.collective, bytes, 0, c.sharedOnNode[0]};
      return c.algorithm.build(t, c.limits, shape).steps.size();
    };
    EXPECT_LE(stepsFor(int64_t{1} << 40), 2 * stepsFor(int64_t{1} << 28)) << c;
  });
}

TEST(RootedCollectives, WorkForEveryRoot) {
  const test::Share share = test::shareUnderSanitizers();
  uint64_t number = 0;
  for (const NamedAlgorithm& algorithm : allAlgorithms()) {
    if (!hasRoot(algorithm.collective)) continue;
    for (const Nodes& nodes : kGroups) {
      if (!algorithm.serves(nodes)) continue;
      for (const auto& sharing : sharingsOf(algorithm, nodes)) {
        for (Rank root = 0; root < numRanksOf(nodes); ++root) {
          if (!share.has(number++)) continue;
          const Case c{algorithm, nodes, smallLimits(2), 1500, root, sharing};
          const plan::Verdict verdict = checkRepeated(c, 2);
          ASSERT_TRUE(verdict.ok()) << c << "\n" << verdict.problem;
        }
      }
    }
  }
}

// Each node decides for itself whether its buffers are shared, so the messages must be the same in both cases.
TEST_P(Algorithms, SendTheSameMessagesForSharedAndPrivateBuffers) {
  if (GetParam().needsShared) return;
  forEachGroup(smallLimits(2), [](Case c) {
    if (c.algorithm.collective != Collective::Barrier) c.bytes = 1500;
    for (Rank r = 0; r < numRanksOf(c.nodes); ++r) {
      const plan::Topology t(c.nodes, r);
      std::vector<std::vector<std::tuple<Rank, int, int64_t, int64_t, int64_t>>> puts(2);
      for (const bool shared : {false, true}) {
        const plan::Plan plan =
            c.algorithm.build(t, c.limits, {c.algorithm.collective, c.bytes, 0, shared});
        for (const plan::Step& s : plan.steps) {
          if (s.op != plan::Op::Put && s.op != plan::Op::Receive) continue;
          puts[shared].emplace_back(s.who, s.stream, s.length, s.value.base, s.value.perTrip);
        }
      }
      EXPECT_EQ(puts[0], puts[1]) << c << " rank " << r;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, Algorithms, testing::ValuesIn(allAlgorithms()), [](const auto& info) {
  return fmt::format("{}_{}", toString(info.param.collective), info.param.name);
});

}  // namespace
}  // namespace smddp::collectives
