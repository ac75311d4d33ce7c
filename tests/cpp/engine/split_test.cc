// Groups that are split from a group, without the store.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "engine/calls.h"
#include "engine/split.h"
#include "support/ranks.h"

namespace smddp::test {
namespace {

using testing::Each;
using testing::HasSubstr;

// Splits the group of `members` (ranks of `parent`). Null for ranks that are not in it.
std::shared_ptr<engine::groups::Group> split(RankContext& rank,
                                             const std::shared_ptr<engine::groups::Group>& parent,
                                             const std::vector<Rank>& members) {
  const auto me = std::find(members.begin(), members.end(), parent->spec.me);
  if (me == members.end()) return nullptr;
  const engine::groups::GroupSpec spec{"part", static_cast<Rank>(me - members.begin()),
                                       static_cast<int>(members.size())};
  return engine::splitGroup(rank.engine, parent, spec, members, kTimeout);
}

// The ranks of the group's members in the first group, in the order of the new group.
std::vector<int32_t> gathered(RankContext& rank,
                              const std::shared_ptr<engine::groups::Group>& group) {
  std::vector<int32_t> mine{rank.rank};
  std::vector<int32_t> all(static_cast<size_t>(group->spec.size));
  auto request = allGather(bytesOf(mine), {bytesOf(all)});
  request.timeout = kTimeout;
  const auto completion = rank.engine.submit(*group, std::move(request));
  rank.engine.wait(*group, *completion);
  if (completion->error()) throw *completion->error();
  return all;
}

class SplitTest : public testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Layouts, SplitTest,
                         testing::Values(std::vector{4}, std::vector{2, 2}, std::vector{3, 1},
                                         std::vector{1, 1, 1, 1}));

TEST_P(SplitTest, AnyRanksInAnyOrder) {
  runRanks(GetParam(), [](RankContext& rank) {
    const std::vector<std::vector<Rank>> parts{{0, 1, 2, 3}, {3, 1}, {2}, {1, 2, 0}};
    for (const auto& members : parts) {
      const auto group = split(rank, rank.group, members);
      if (group) {
        EXPECT_EQ(gathered(rank, group), members);
      }
    }
  });
}

TEST_P(SplitTest, PartsAreMadeAtTheSameTimeAndSplitAgain) {
  runRanks(GetParam(), [](RankContext& rank) {
    const std::vector<Rank> mine =
        rank.rank % 2 == 0 ? std::vector<Rank>{2, 0} : std::vector<Rank>{1, 3};
    const auto half = split(rank, rank.group, mine);
    EXPECT_EQ(gathered(rank, half), mine);
    const auto turned = split(rank, half, {1, 0});
    EXPECT_EQ(gathered(rank, turned), (std::vector<Rank>{mine[1], mine[0]}));
    // The first group and the new groups can be used at the same time, and independently.
    EXPECT_EQ(gathered(rank, rank.group), (std::vector<Rank>{0, 1, 2, 3}));
    rank.engine.destroyGroup(half);
    EXPECT_EQ(gathered(rank, turned).size(), 2u);
  });
}

// What each rank says when the ranks name these members: the text of its error, or nothing.
std::vector<std::string> agreed(const std::vector<int>& layout,
                                const std::vector<std::vector<Rank>>& lists) {
  std::vector<std::string> texts(lists.size());
  runRanks(layout, [&](RankContext& rank) {
    try {
      engine::agreeOnMembers(rank.engine, rank.group, lists[rank.rank], kTimeout);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::Mismatch) << error.what();
      texts[rank.rank] = error.what();
    }
    // The group that was to be split is as good as before.
    EXPECT_EQ(gathered(rank, rank.group), (std::vector<Rank>{0, 1, 2}));
  });
  return texts;
}

TEST(SplitTest, AllHearWhenMembersDisagree) {
  for (const std::vector<int>& layout : {std::vector{3}, std::vector{1, 1, 1}}) {
    EXPECT_THAT(agreed(layout, {{0, 1, 2}, {0, 1, 2}, {2, 1, 0}}),
                Each(HasSubstr("[0, 1, 2] on rank 0, [2, 1, 0] on rank 2")));
    // Rank 0 would have a group of its own, and rank 1 would wait for it.
    EXPECT_THAT(agreed(layout, {{0}, {0, 1}, {2}}),
                Each(HasSubstr("[0, 1] on rank 1, [0] on rank 0")));
    EXPECT_THAT(agreed(layout, {{0, 1}, {1, 2}, {1, 2}}),
                Each(HasSubstr("[0, 1] on rank 0, [1, 2] on rank 1")));
    // Rank 2 is in no group.
    EXPECT_THAT(agreed(layout, {{0, 1}, {0, 1}, {1}}), Each(""));
    EXPECT_THAT(agreed(layout, {{0}, {2, 1}, {2, 1}}), Each(""));
  }
}

TEST(SplitTest, AllHearWhyOneCannotJoin) {
  for (const std::vector<int>& layout : {std::vector{3}, std::vector{2, 1}, std::vector{1, 1, 1}}) {
    const auto body = [](RankContext& rank) {
      std::vector<std::shared_ptr<engine::groups::Group>> alone;
      if (rank.rank == 1) {
        const auto fillMemory = [&] {
          for (;;) alone.push_back(split(rank, rank.group, {1}));
        };
        EXPECT_THROW(fillMemory(), Error);
      }
      try {
        split(rank, rank.group, {0, 1, 2});
        FAIL() << "rank 1 has no memory for another group";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::Resource);
        EXPECT_THAT(error.what(), HasSubstr("rank 1 cannot join group \"part\": "));
      }
      // The group that was to be split is as good as before.
      EXPECT_EQ(gathered(rank, rank.group), (std::vector<Rank>{0, 1, 2}));
    };
    runRanks(layout, body, [](Rank me, engine::Engine::Options& options) {
      if (me == 1) options.process.slabBytes = size_t{1} << 30;
    });
  }
}

TEST(SplitTest, ARankThatIsMissingIsAnError) {
  runRanks({2}, [](RankContext& rank) {
    if (rank.rank == 1) return;
    const engine::groups::GroupSpec spec{"part", 0, 2};
    try {
      engine::splitGroup(rank.engine, rank.group, spec, {0, 1}, 300'000'000);
      FAIL() << "rank 1 never came";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::Timeout) << error.what();
    }
  });
}

}  // namespace
}  // namespace smddp::test
