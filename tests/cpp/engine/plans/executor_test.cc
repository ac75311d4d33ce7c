// What the executor says of a plan that cannot go on.
#include "engine/plans/executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plan/builder.h"

namespace smddp::engine::plans {
namespace {

constexpr int kCopied = 1;

// Three full chunks and a shorter one. For each, this rank waits for its mate.
plan::Plan waitsInEachChunk(const plan::Topology& topology) {
  plan::Builder b(topology, {}, "waits in each chunk");
  b.arrive();
  b.eachChunk(3 * 256 + 64, 256, [&](const plan::Chunk& c) {
    b.stage("sum");
    b.waitRank(1, kCopied, c.index + 1);
    b.signal(kCopied, c.index + 1);
  });
  return b.done();
}

TEST(Executor, NamesTheChunkInWhichItWaits) {
  Ownership ownership;
  ASSERT_TRUE(ownership.tryAcquire());
  team::Membership membership{.name = "",
                              .topology = plan::Topology::fromNames({"a", "a"}, 0),
                              .peers = {},
                              .jobRanks = {},
                              .self = ""};
  std::array<memory::TrackHeader, 2> headers{};
  team::Track track;
  track.executionNumber = 1;
  track.headers = {&headers[0], &headers[1]};
  track.halves.resize(2);
  team::TeamBell bell;
  const CachedPlan cached(waitsInEachChunk(membership.topology));
  ASSERT_EQ(cached.plan.lanes.at(0).blocks.size(), 2u) << "the shorter chunk is a block of its own";
  Executor executor(ownership, membership, track, bell);
  executor.start(cached, /*arrived=*/true);
  for (int64_t chunk = 0; chunk < 4; ++chunk) {
    executor.advance();
    EXPECT_EQ(executor.blockedStep().where, fmt::format("in stage \"sum\", chunk {}", chunk));
    EXPECT_THAT(executor.blockedStep().awaited, testing::ElementsAre(1));
    track.signal(/*myLocal=*/1, kCopied, chunk + 1);
  }
  executor.advance();
  EXPECT_TRUE(executor.done());
  ownership.letGo();
}

}  // namespace
}  // namespace smddp::engine::plans
