// Which way calls on GPU tensors go.
#include "cuda/path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "common/error.h"
#include "cuda/job.h"

namespace smddp::cuda {
namespace {

using testing::HasSubstr;

const std::vector<Place> kOneNode{{0, "GPU-a"}, {0, "GPU-b"}, {0, "GPU-c"}};
const std::vector<Place> kShared{{0, "GPU-a"}, {0, "GPU-b"}, {0, "GPU-a"}};
// GPUs of two nodes may have the same name: nodes that one machine plays have the same GPUs.
const std::vector<Place> kTwoNodes{{0, "GPU-a"}, {1, "GPU-a"}};

TEST(Path, IsNcclForGpusOfTheirOwnOnOneNode) {
  EXPECT_EQ(choosePath("auto", true, kOneNode).path, Path::Nccl);
  EXPECT_EQ(choosePath("auto", true, std::span(kOneNode).first(1)).path, Path::Nccl);
}

TEST(Path, IsTheHostForASharedGpu) {
  const Choice choice = choosePath("auto", true, kShared);
  EXPECT_EQ(choice.path, Path::Host);
  EXPECT_THAT(choice.reason, HasSubstr("ranks 0 and 2 share GPU GPU-a"));
  // A group of only two of them does not share a GPU.
  EXPECT_EQ(choosePath("auto", true, std::span(kShared).first(2)).path, Path::Nccl);
}

TEST(Path, IsTheHostBetweenNodes) {
  const Choice choice = choosePath("auto", true, kTwoNodes);
  EXPECT_EQ(choice.path, Path::Host);
  EXPECT_THAT(choice.reason, HasSubstr("several nodes"));
}

TEST(Path, IsTheHostWithoutNccl) {
  const Choice choice = choosePath("auto", false, kOneNode);
  EXPECT_EQ(choice.path, Path::Host);
  EXPECT_THAT(choice.reason, HasSubstr("without NCCL"));
  EXPECT_TRUE(decidesAlone("auto", false));
}

TEST(Path, IsWhatTheSettingSays) {
  EXPECT_EQ(choosePath("host", true, kOneNode).path, Path::Host);
  EXPECT_EQ(choosePath("host", false, kOneNode).path, Path::Host);
  EXPECT_EQ(choosePath("nccl", true, kShared).path, Path::Nccl);
  EXPECT_EQ(choosePath("nccl", true, kTwoNodes).path, Path::Nccl);
  EXPECT_TRUE(decidesAlone("host", true));
  EXPECT_TRUE(decidesAlone("nccl", true));
  EXPECT_FALSE(decidesAlone("auto", true));
}

TEST(Path, IsIpcWhereItIsAskedForAndAllShareOneGpu) {
  const std::vector<Place> one{{0, "GPU-a"}, {0, "GPU-a"}, {0, "GPU-a"}};
  for (const bool haveNccl : {false, true}) {
    EXPECT_EQ(choosePath("ipc", haveNccl, one).path, Path::Ipc);
    EXPECT_EQ(choosePath("auto", haveNccl, one).path, Path::Host);
    EXPECT_FALSE(decidesAlone("ipc", haveNccl));
  }
  // For other ranks it is as if nothing were set.
  EXPECT_EQ(choosePath("ipc", true, kOneNode).path, Path::Nccl);
  EXPECT_EQ(choosePath("ipc", true, kShared).path, Path::Host);
  EXPECT_EQ(choosePath("ipc", true, kTwoNodes).path, Path::Host);
  EXPECT_EQ(choosePath("ipc", false, kOneNode).path, Path::Host);
  EXPECT_EQ(choosePath("ipc", true, std::span(one).first(1)).path, Path::Nccl);
  const std::vector<Place> many(kMaxSharing + 1, Place{0, "GPU-a"});
  EXPECT_EQ(choosePath("ipc", true, many).path, Path::Host);
}

TEST(Path, IsRailsWhereTheyAreAskedForAndNodesAreAlike) {
  using Places = std::vector<Place>;
  EXPECT_EQ(choosePath("rails", true, Places{{0, "a"}, {0, "b"}, {1, "a"}, {1, "b"}}).path,
            Path::Rails);
  EXPECT_EQ(choosePath("rails", true, Places{{0, "a"}, {1, "a"}, {1, "b"}, {0, "b"}}).path,
            Path::Rails);
  EXPECT_FALSE(decidesAlone("rails", true));
  const auto refused = [](const Places& places, const char* why) {
    const Choice choice = choosePath("rails", true, places);
    EXPECT_EQ(choice.path, Path::Host);
    EXPECT_THAT(choice.reason, HasSubstr(why));
    EXPECT_EQ(choosePath("auto", true, places).path, Path::Host);
  };
  refused({{0, "a"}, {0, "a"}, {1, "a"}, {1, "b"}}, "ranks 0 and 1 share a GPU");
  refused({{0, "a"}, {0, "b"}, {1, "a"}}, "different numbers");
  refused({{0, "a"}, {1, "a"}}, "one rank each");
  // On one node it is as if nothing were set.
  EXPECT_EQ(choosePath("rails", true, kOneNode).path, Path::Nccl);
  EXPECT_EQ(choosePath("rails", true, kShared).path, Path::Host);
  EXPECT_EQ(choosePath("rails", false, Places{{0, "a"}, {0, "b"}, {1, "a"}, {1, "b"}}).path,
            Path::Host);
}

TEST(Path, RefusesWhatItCannotDo) { EXPECT_THROW(choosePath("nccl", false, kOneNode), Error); }

}  // namespace
}  // namespace smddp::cuda
