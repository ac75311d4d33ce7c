#include "collectives/selection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "collectives/algorithms.h"

namespace smddp::collectives {
namespace {

using testing::HasSubstr;
using testing::StrEq;

constexpr int64_t kOneShot = 1024;
const plan::Topology kOneNode({{0, 1}}, 0);
const plan::Topology kTwoNodes({{0, 1}, {2, 3}}, 0);

Shape shapeOf(Collective collective, int64_t bytes, bool shared = false) {
  return {collective, bytes, 0, shared};
}

const char* chosen(const plan::Topology& t, const Shape& shape, const std::string& overrides = "") {
  return select(t, {}, shape, kOneShot, overrides).name;
}

std::string refusal(const plan::Topology& t, const Shape& shape, const std::string& overrides) {
  try {
    chosen(t, shape, overrides);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Usage);
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Selection, TakesTheAllreduceForNodesBuffersAndSize) {
  const auto allreduce = [](int64_t bytes, bool shared) {
    return shapeOf(Collective::AllReduce, bytes, shared);
  };
  EXPECT_THAT(chosen(kOneNode, allreduce(kOneShot, false)), StrEq("one_shot"));
  EXPECT_THAT(chosen(kOneNode, allreduce(kOneShot, true)), StrEq("one_shot"));
  EXPECT_THAT(chosen(kOneNode, allreduce(kOneShot + 1, false)), StrEq("two_phase"));
  EXPECT_THAT(chosen(kOneNode, allreduce(kOneShot + 1, true)), StrEq("zero_copy"));
  for (bool shared : {false, true}) {
    EXPECT_THAT(chosen(kTwoNodes, allreduce(8, shared)), StrEq("recursive_doubling"));
    EXPECT_THAT(chosen(kTwoNodes, allreduce(1 << 20, shared)), StrEq("direct"));
  }
}

// A group of `count` nodes with one rank each.
plan::Topology manyNodes(int count) {
  std::vector<std::vector<Rank>> nodes;
  for (Rank r = 0; r < count; ++r) nodes.push_back({r});
  return {nodes, 0};
}

TEST(Selection, TakesTheAllreduceForTheNumberOfNodes) {
  const Shape tiny = shapeOf(Collective::AllReduce, 8);
  const Shape large = shapeOf(Collective::AllReduce, 25 << 20);
  for (const int nodes : {2, 4, 8, 16, 17, 63, 64}) {
    EXPECT_THAT(chosen(manyNodes(nodes), tiny), StrEq("recursive_doubling")) << nodes;
  }
  for (const int nodes : {3, 5, 7, 15}) {
    EXPECT_THAT(chosen(manyNodes(nodes), tiny), StrEq("direct")) << nodes;
  }
  for (const int nodes : {2, 3, 32, 63, 65, 127}) {
    EXPECT_THAT(chosen(manyNodes(nodes), large), StrEq("direct")) << nodes;
  }
  for (const int nodes : {64, 128, 256}) {
    EXPECT_THAT(chosen(manyNodes(nodes), large), StrEq("halving_doubling")) << nodes;
  }
}

// `ranks` ranks on each of `count` nodes.
plan::Topology manyRanks(int count, int ranks) {
  std::vector<std::vector<Rank>> nodes(static_cast<size_t>(count));
  for (Rank r = 0; r < count * ranks; ++r) nodes[static_cast<size_t>(r / ranks)].push_back(r);
  return {nodes, 0};
}

TEST(Selection, HalvesOnAFewNodesWhereNotAllOfThemWouldServe) {
  const auto allreduce = [](int nodes, int ranks, int64_t kib) {
    return std::string(chosen(manyRanks(nodes, ranks), shapeOf(Collective::AllReduce, kib << 10)));
  };
  // Nodes, ranks of each, and the sizes between which it is taken, in KiB.
  const int64_t rows[][4] = {
      {4, 1, 32, 256}, {8, 1, 32, 512}, {16, 1, 32, 1024}, {4, 2, 64, 512}, {8, 2, 64, 1024}};
  for (const auto& [nodes, ranks, first, end] : rows) {
    const auto what = [&allreduce, nodeCount = static_cast<int>(nodes),
                       ranksOfEach = static_cast<int>(ranks)](int64_t kib) {
      return allreduce(nodeCount, ranksOfEach, kib);
    };
    EXPECT_EQ(what(first - 1), "direct") << nodes << "x" << ranks;
    EXPECT_EQ(what(first), "halving_doubling") << nodes << "x" << ranks;
    EXPECT_EQ(what(end - 1), "halving_doubling") << nodes << "x" << ranks;
    EXPECT_EQ(what(end), "direct") << nodes << "x" << ranks;
  }
  for (const int nodes : {2, 3, 5, 6, 7, 12}) {
    for (const int64_t kib : {16, 32, 64, 128, 256, 512}) {
      EXPECT_EQ(allreduce(nodes, 1, kib), "direct") << nodes << " nodes, " << kib << " KiB";
    }
  }
  Shape encoded = shapeOf(Collective::AllReduce, 64 << 10);
  encoded.wire = Wire::bf16;
  EXPECT_STREQ(chosen(manyNodes(4), encoded), "direct") << "halving and doubling knows no formats";
}

TEST(Selection, NeverTakesRecursiveDoublingBeyondTheStagingMemory) {
  plan::Limits limits;
  limits.halfBytes = 8 << 10;
  const Shape shape = shapeOf(Collective::AllReduce, 8 << 10);
  EXPECT_THAT(select(kTwoNodes, {}, shape, kOneShot, "").name, StrEq("recursive_doubling"));
  EXPECT_THAT(select(kTwoNodes, limits, shape, kOneShot, "").name, StrEq("direct"));
}

// The bytes that a rank reads from others decide, not the length of the vector.
TEST(Selection, TakesOneShotForFewerBytesOfMoreRanks) {
  const plan::Topology four({{0, 1, 2, 3}}, 0);
  for (const Collective c : {Collective::AllReduce, Collective::Reduce}) {
    EXPECT_THAT(chosen(kOneNode, shapeOf(c, 1000)), StrEq("one_shot"));
    EXPECT_THAT(chosen(four, shapeOf(c, 336)), StrEq("one_shot"));
    EXPECT_THAT(chosen(four, shapeOf(c, 344)), testing::Not(StrEq("one_shot")));
  }
}

TEST(Selection, CopiesLessOfBuffersThatNeedNoCopy) {
  const auto allreduce = [](int64_t bytes, bool shared) {
    return select(kOneNode, {}, shapeOf(Collective::AllReduce, bytes, shared), 128 << 10, "").name;
  };
  EXPECT_THAT(allreduce(8 << 10, true), StrEq("one_shot"));
  EXPECT_THAT(allreduce(16 << 10, true), StrEq("zero_copy"));
  EXPECT_THAT(allreduce(128 << 10, false), StrEq("one_shot"));
}

// After the arrival no algorithm may be taken that copies before it, whatever was asked for.
TEST(Selection, TakesNothingThatCopiesFirstAfterTheArrival) {
  for (const std::string overrides : {"", "allreduce=one_shot"}) {
    for (const int64_t bytes : {0, 4, 1024, 1025, 1 << 20}) {
      for (const bool shared : {false, true}) {
        Shape shape = shapeOf(Collective::AllReduce, bytes, shared);
        shape.afterArrival = true;
        const Choice& choice = select(kOneNode, {}, shape, kOneShot, overrides);
        EXPECT_THAT(choice.name, StrEq(shared ? "zero_copy" : "two_phase"));
      }
    }
  }
}

// One rank that copies is enough. The root, for example, may have nothing to copy.
TEST(Selection, KnowsWhatCopiesFirst) {
  for (int c = 0; c < kNumCollectives; ++c) {
    const auto collective = static_cast<Collective>(c);
    for (const std::string& name : algorithmsOf(collective)) {
      bool copies = false, marked = false;
      for (const bool shared : {false, true}) {
        for (const auto& nodes : {std::vector<std::vector<Rank>>{{0, 1}}, {{0, 1}, {2, 3}}}) {
          for (const auto& node : nodes) {
            for (const Rank me : node) {
              const plan::Topology t(nodes, me);
              const Shape shape = shapeOf(collective, 64, shared);
              const std::string override = fmt::format("{}={}", toString(collective), name);
              const Choice* choice = nullptr;
              try {
                choice = &select(t, {}, shape, kOneShot, override);
              } catch (const Error&) {
                continue;  // not with these nodes or buffers
              }
              copies |= choice->build(t, {}, shape).preamble.numSteps > 2;
              marked |= choice->preamble != Preamble::NoCopy;
            }
          }
        }
      }
      EXPECT_EQ(copies, marked) << toString(collective) << "/" << name;
    }
  }
}

// engine::operations::Operations::runOneShot makes the two moves of such a plan itself, without looking at the other
// steps.
TEST(Selection, KnowsWhatIsOneCopyAndOneSum) {
  for (int c = 0; c < kNumCollectives; ++c) {
    const auto collective = static_cast<Collective>(c);
    for (const std::string& name : algorithmsOf(collective)) {
      bool isOneShot = true, isMarked = false;
      for (const Rank me : {0, 1, 2}) {
        const plan::Topology t({{0, 1, 2}}, me);
        const std::string override = fmt::format("{}={}", toString(collective), name);
        const Choice* choice = nullptr;
        try {
          choice = &select(t, {}, shapeOf(collective, 64), kOneShot, override);
        } catch (const Error&) {
          isOneShot = false;  // not with private buffers
          continue;
        }
        const plan::Plan plan = choice->build(t, {}, shapeOf(collective, 64));
        const auto opsOf = [&](const plan::Block& block) {
          std::vector<plan::Op> ops;
          for (uint32_t i = 0; i < block.numSteps; ++i) {
            ops.push_back(plan.steps[block.firstStep + i].op);
          }
          return ops;
        };
        isOneShot &=
            plan.channels.empty() && plan.lanes.size() == 1 &&
            plan.lanes.front().blocks.size() == 1 && plan.lanes.front().blocks.front().trips == 1 &&
            opsOf(plan.preamble) == std::vector{plan::Op::Copy, plan::Op::Signal, plan::Op::Wait} &&
            opsOf(plan.lanes.front().blocks.front()) == std::vector{plan::Op::Reduce};
        isMarked |= choice->preamble == Preamble::OneShot;
      }
      EXPECT_EQ(isOneShot, isMarked) << toString(collective) << "/" << name;
    }
  }
}

TEST(Selection, NeverTakesOneShotBeyondTheStagingMemory) {
  plan::Limits limits;
  limits.halfBytes = 512 << 10;
  const Shape shape = shapeOf(Collective::AllReduce, 1 << 20);
  EXPECT_THAT(select(kOneNode, limits, shape, 2 << 20, "").name, StrEq("two_phase"));
}

TEST(Selection, TakesTheOthersByNodes) {
  EXPECT_THAT(chosen(kOneNode, shapeOf(Collective::Broadcast, 8)), StrEq("shared_memory"));
  EXPECT_THAT(chosen(kTwoNodes, shapeOf(Collective::Broadcast, 8)), StrEq("chain"));
  EXPECT_THAT(chosen(kOneNode, shapeOf(Collective::AllGather, 8)), StrEq("shared_memory"));
  EXPECT_THAT(chosen(kTwoNodes, shapeOf(Collective::AllGather, 8)), StrEq("mesh"));
  EXPECT_THAT(chosen(kOneNode, shapeOf(Collective::ReduceScatter, 8)), StrEq("shared_memory"));
  EXPECT_THAT(chosen(kTwoNodes, shapeOf(Collective::ReduceScatter, 8)), StrEq("direct"));
  EXPECT_THAT(chosen(kOneNode, shapeOf(Collective::Reduce, kOneShot)), StrEq("one_shot"));
  EXPECT_THAT(chosen(kOneNode, shapeOf(Collective::Reduce, kOneShot + 1)), StrEq("shared_memory"));
  EXPECT_THAT(chosen(kTwoNodes, shapeOf(Collective::Reduce, 8)), StrEq("direct"));
  for (const Collective c : {Collective::Gather, Collective::Scatter, Collective::AllToAll}) {
    EXPECT_THAT(chosen(kOneNode, shapeOf(c, 8)), StrEq("direct"));
    EXPECT_THAT(chosen(kTwoNodes, shapeOf(c, 8)), StrEq("direct"));
  }
  EXPECT_THAT(chosen(kOneNode, shapeOf(Collective::Barrier, 0)), StrEq("exchange"));
  EXPECT_THAT(chosen(kTwoNodes, shapeOf(Collective::Barrier, 0)), StrEq("exchange"));
}

TEST(Selection, ObeysOverridesForTheirCollectiveOnly) {
  const std::string overrides = "allreduce=ring, broadcast=chain";
  EXPECT_THAT(chosen(kTwoNodes, shapeOf(Collective::AllReduce, 8), overrides), StrEq("ring"));
  EXPECT_THAT(chosen(kOneNode, shapeOf(Collective::AllReduce, 8), overrides), StrEq("ring"));
  EXPECT_THAT(chosen(kOneNode, shapeOf(Collective::Broadcast, 8), overrides), StrEq("chain"));
  EXPECT_THAT(chosen(kTwoNodes, shapeOf(Collective::AllGather, 8), overrides), StrEq("mesh"));
}

TEST(Selection, TakesTheFirstOverrideThatServes) {
  const std::string overrides = "allreduce=zero_copy,allreduce=two_phase,allreduce=ring";
  EXPECT_THAT(chosen(kOneNode, shapeOf(Collective::AllReduce, 8, true), overrides),
              StrEq("zero_copy"));
  EXPECT_THAT(chosen(kOneNode, shapeOf(Collective::AllReduce, 8), overrides), StrEq("two_phase"));
  EXPECT_THAT(chosen(kTwoNodes, shapeOf(Collective::AllReduce, 8), overrides), StrEq("ring"));
}

TEST(Selection, RefusesWhatItDoesNotKnow) {
  const Shape shape = shapeOf(Collective::AllReduce, 8);
  EXPECT_THAT(
      refusal(kOneNode, shape, "allreduce=rign"),
      HasSubstr("zero_copy, two_phase, recursive_doubling, halving_doubling, direct, ring"));
  EXPECT_THAT(refusal(kOneNode, shape, "allreduce"), HasSubstr("only one_shot"));
  EXPECT_THAT(refusal(kOneNode, shape, "allredcue=ring"), HasSubstr("allreduce, broadcast"));
  // A mistake in the entry of another collective is also reported at once.
  EXPECT_THAT(refusal(kOneNode, shape, "broadcast=ring"), HasSubstr("shared_memory, chain"));
}

TEST(Selection, ChecksOverridesBeforeThereIsARequest) {
  EXPECT_NO_THROW(checkOverrides(""));
  EXPECT_NO_THROW(checkOverrides(" allreduce=ring ,broadcast=chain"));
  // An algorithm that cannot serve every request is accepted: it may serve those that come.
  EXPECT_NO_THROW(checkOverrides("allreduce=zero_copy"));
  try {
    checkOverrides("allreduce=ring,broadcast=ring");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Usage);
    EXPECT_THAT(error.what(),
                StrEq("SMDDP_ALGORITHM=allreduce=ring,broadcast=ring: broadcast has no "
                      "algorithm \"ring\", only shared_memory, chain"));
  }
}

TEST(Selection, RefusesAnOverrideThatCannotServe) {
  const std::string text =
      refusal(kTwoNodes, shapeOf(Collective::AllReduce, 8), "allreduce=two_phase");
  EXPECT_THAT(text, HasSubstr("SMDDP_ALGORITHM=allreduce=two_phase names no algorithm"));
  EXPECT_THAT(text, HasSubstr("2 node"));
  EXPECT_THAT(text,
              HasSubstr("add to it recursive_doubling or halving_doubling or direct or ring"));
  EXPECT_THAT(refusal(kOneNode, shapeOf(Collective::AllReduce, 8), "allreduce=zero_copy"),
              HasSubstr("private"));
  EXPECT_THAT(refusal(kOneNode, shapeOf(Collective::AllReduce, 1 << 30), "allreduce=one_shot"),
              HasSubstr("two_phase"));
}

TEST(Selection, ListsEveryAlgorithmWithItsConditions) {
  const auto infos = listAlgorithms();
  EXPECT_EQ(infos.size(), 20u);
  for (const AlgorithmInfo& info : infos) {
    EXPECT_FALSE(info.serves.empty());
    EXPECT_FALSE(info.chosen.empty());
    // An override may use every listed name.
    const Shape shape = shapeOf(info.collective, 8, true);
    const std::string overrides = std::string(toString(info.collective)) + "=" + info.name;
    EXPECT_THAT(chosen(kOneNode, shape, overrides), StrEq(info.name));
  }
}

}  // namespace
}  // namespace smddp::collectives
