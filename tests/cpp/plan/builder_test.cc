#include "plan/builder.h"

#include <random>

#include <gtest/gtest.h>

namespace smddp::plan {
namespace {

const Topology kPair({{0, 1}}, 0);
const Topology kTwoNodes({{0}, {1}}, 0);

const Lane& laneOf(const Plan& plan, const std::string& name) {
  for (const Lane& lane : plan.lanes) {
    if (lane.name == name) return lane;
  }
  throw std::out_of_range(name);
}

TEST(Share, PartsTileTheWhole) {
  std::mt19937 random(20261);
  for (int round = 0; round < 2000; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round << " of seed 20261");
    const int64_t whole = std::uniform_int_distribution<int64_t>(0, 5000)(random);
    const int64_t limit = std::uniform_int_distribution<int64_t>(0, whole)(random);
    const int64_t offset = std::uniform_int_distribution<int64_t>(0, 1000)(random);
    const int parts = std::uniform_int_distribution<int>(1, 20)(random);
    int64_t at = offset, least = whole, most = 0;
    for (int i = 0; i < parts; ++i) {
      const Range part = share({offset, whole}, i, parts, limit);
      ASSERT_GE(part.length, 0);
      ASSERT_EQ(part.offset, at);
      ASSERT_TRUE(part.length == 0 || (part.offset - offset) % kGranule == 0);
      at += part.length;
      const int64_t unclipped = share({offset, whole}, i, parts, whole).length;
      least = std::min(least, unclipped);
      most = std::max(most, unclipped);
    }
    ASSERT_EQ(at, offset + limit);
    // Nearly equal: lengths differ by at most a granule, and the last part may be shorter by less than a granule.
    ASSERT_LT(most - least, 2 * kGranule);
  }
}

TEST(Builder, RepeatsWhatIsAffine) {
  Builder b(kPair, {}, "affine");
  const uint8_t pool = b.pool("slots", 3, 256);
  b.arrive();
  b.eachChunk(1000 * 256, 256, [&](const Chunk& c) {
    b.stage("copy");
    b.waitMates(2, c.index - 2);
    b.copy({b.slot(pool, 0, c.index, 0)}, b.in(c.offset), c.length);
    b.signal(1, c.index + 1);
  });
  const Plan plan = b.done();
  ASSERT_EQ(plan.lanes.size(), 1u);
  ASSERT_EQ(plan.lanes[0].blocks.size(), 1u);
  const Block& block = plan.lanes[0].blocks[0];
  EXPECT_EQ(block.trips, 1000);
  ASSERT_EQ(block.numSteps, 3u);
  const Step* steps = &plan.steps[block.firstStep];
  EXPECT_EQ(steps[0].value, (Affine{-2, 1}));
  EXPECT_EQ(plan.destination(steps[1], 0).index, (Affine{0, 1}));
  EXPECT_EQ(plan.source(steps[1], 0).offset, (Affine{0, 256}));
  EXPECT_EQ(steps[2].value, (Affine{1, 1}));
}

TEST(Builder, RefusesWhatIsNotAffine) {
  const auto build = [](const std::function<int64_t(int64_t)>& value) {
    Builder b(kPair, {}, "numbers");
    b.arrive();
    b.eachChunk(8 * 256, 256, [&](const Chunk& c) {
      b.stage("only");
      b.signal(1, value(c.index));
    });
    return b.done();
  };
  EXPECT_NO_THROW(build([](int64_t k) { return 5 * k + 1; }));
  EXPECT_THROW(build([](int64_t k) { return k * k + 1; }), Error);
  EXPECT_THROW(build([](int64_t k) { return std::min<int64_t>(k + 1, 4); }), Error);
}

TEST(Builder, RefusesStepsThatDependOnTheChunk) {
  const auto build = [](int64_t special) {
    Builder b(kPair, {}, "steps");
    b.arrive();
    b.eachChunk(8 * 256, 256, [&](const Chunk& c) {
      b.stage("only");
      b.signal(1, c.index + 1);
      if (c.index == special) b.waitMates(1, 1);
    });
    return b.done();
  };
  EXPECT_THROW(build(0), Error);
  EXPECT_THROW(build(1), Error);
  EXPECT_THROW(build(7), Error);
}

TEST(Builder, CutsTheTailWhereAFullChunkIsCut) {
  // Chunks of 512 bytes and a tail of 200: the tail's shares are 128 (full cuts 128 each), 72, 0, 0.
  Builder b(kPair, {}, "tail");
  std::vector<Range> tail;
  b.arrive();
  b.eachChunk(3 * 512 + 200, 512, [&](const Chunk& c) {
    b.stage("only");
    if (c.length < c.fullLength) {
      for (int i = 0; i < 4; ++i) tail.push_back(c.share(i, 4));
    }
    for (int i = 0; i < 4; ++i) {
      const Range r = c.share(i, 4);
      b.copy({b.out(r.offset)}, b.in(r.offset), r.length);
    }
  });
  const Plan plan = b.done();
  const Lane& lane = laneOf(plan, "only");
  ASSERT_EQ(lane.blocks.size(), 2u);
  const int64_t full = plan.source(plan.steps[lane.blocks[0].firstStep], 0).offset.perTrip;
  EXPECT_LE(full, 512);
  EXPECT_EQ(full % kGranule, 0);
  const int64_t start = full * lane.blocks[0].trips;
  int64_t at = start;
  for (int i = 0; i < 4; ++i) {
    const Range whole = share({start, full}, i, 4, full);
    const int64_t end = std::min<int64_t>(whole.offset + whole.length, 3 * 512 + 200);
    EXPECT_EQ(tail[static_cast<size_t>(i)].offset, std::min<int64_t>(whole.offset, at));
    EXPECT_EQ(tail[static_cast<size_t>(i)].length, std::max<int64_t>(0, end - at));
    at = std::max(at, end);
  }
  EXPECT_EQ(at, 3 * 512 + 200);
}

TEST(Builder, ChunksTileTheVectorWithinTheirLimit) {
  std::mt19937 random(20262);
  for (int round = 0; round < 500; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round << " of seed 20262");
    const int64_t bytes = std::uniform_int_distribution<int64_t>(1, 20000)(random);
    const int64_t limit = std::uniform_int_distribution<int64_t>(64, 3000)(random);
    Builder b(kPair, {}, "tiles");
    b.arrive();
    b.eachChunk(bytes, limit, [&](const Chunk& c) {
      ASSERT_LE(c.length, limit);
      ASSERT_LE(c.length, c.fullLength);
      b.stage("only");
      b.copy({b.out(c.offset)}, b.in(c.offset), c.length);
    });
    const Plan plan = b.done();
    int64_t at = 0;
    for (const Block& block : plan.lanes.at(0).blocks) {
      const Step& step = plan.steps[block.firstStep];
      for (int64_t k = 0; k < block.trips; ++k) {
        ASSERT_EQ(plan.source(step, 0).offset.at(k), at);
        at += step.length;
      }
    }
    ASSERT_EQ(at, bytes);
  }
}

TEST(Builder, CountsMessagesThroughChunksAndTail) {
  Limits limits;
  limits.messageBytes = 256;
  Builder b(kTwoNodes, limits, "messages");
  b.arrive();
  b.eachChunk(10 * 256 + 64, 256, [&](const Chunk& c) {
    b.stage("send");
    b.put(1, 0, b.in(c.offset), c.length / 2);
    b.put(1, 0, b.in(c.offset), c.length / 2);
    b.stage("receive");
    for (int i = 0; i < 2; ++i) {
      const Ref message = b.receive(1, 0, c.length / 2);
      b.copy({b.out(c.offset)}, message, c.length / 2);
      b.release(1, 0);
    }
  });
  b.stage("send");
  b.flush(1, 0);
  const Plan plan = b.done();
  ASSERT_EQ(plan.channels.size(), 1u);
  const Lane& send = laneOf(plan, "send");
  const int64_t chunks = send.blocks[0].trips + 1;
  EXPECT_EQ(plan.channels[0].puts, 2 * chunks);
  EXPECT_EQ(plan.channels[0].receives, 2 * chunks);
  EXPECT_EQ(plan.steps[send.blocks[0].firstStep].value, (Affine{1, 2}));
  EXPECT_EQ(plan.steps[send.blocks[0].firstStep + 1].value, (Affine{2, 2}));
  ASSERT_EQ(send.blocks.size(), 3u);
  EXPECT_EQ(plan.steps[send.blocks[1].firstStep].value.base, 2 * chunks - 1);
  EXPECT_EQ(plan.steps[send.blocks[2].firstStep].value.base, 2 * chunks);
  const Step& copy = plan.steps[laneOf(plan, "receive").blocks[0].firstStep + 1];
  EXPECT_EQ(plan.source(copy, 0).space, Space::Message);
  EXPECT_EQ(plan.source(copy, 0).index, (Affine{0, 2}));
}

TEST(Builder, EmptyVectorIsOneEmptyChunk) {
  Builder b(kTwoNodes, {}, "empty");
  b.arrive();
  int calls = 0;
  b.eachChunk(0, 256, [&](const Chunk& c) {
    ++calls;
    b.stage("only");
    b.copy({b.out(c.offset)}, b.in(c.offset), c.length);
    b.put(1, 0, b.in(c.offset), c.length);
    b.receive(1, 0, c.length);
    b.release(1, 0);
  });
  const Plan plan = b.done();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(plan.channels.at(0).puts, 1);
  // There is nothing to copy, but the messages are sent, because peers may have bytes.
  EXPECT_EQ(plan.lanes.at(0).blocks.at(0).numSteps, 3u);
}

TEST(Builder, PutsStepsBeforeTheArrivalFirst) {
  Builder b(kPair, {}, "early");
  const uint8_t pool = b.pool("slots", 1, 64);
  b.copy({b.slot(pool, 0, 0, 0)}, b.in(0), 64);
  b.arrive();
  const Plan plan = b.done();
  ASSERT_EQ(plan.preamble.numSteps, 3u);
  const Step* steps = &plan.steps[plan.preamble.firstStep];
  EXPECT_EQ(steps[0].op, Op::Copy);
  EXPECT_EQ(steps[1].op, Op::Signal);
  EXPECT_EQ(steps[2].op, Op::Wait);
  EXPECT_EQ(steps[2].who, kMates);
}

TEST(Builder, RefusesBrokenRules) {
  Limits limits;
  limits.halfBytes = 1024;
  limits.messageBytes = 64;
  EXPECT_THROW(Builder(kPair, limits, "no arrival").done(), Error);
  Builder b(kTwoNodes, limits, "rules");
  EXPECT_THROW(b.stage("too early"), Error);
  EXPECT_THROW(b.pool("large", 3, 512), Error);
  b.arrive();
  EXPECT_THROW(b.arrive(), Error);
  b.stage("only");
  EXPECT_THROW(b.put(0, 0, b.in(0), 64), Error) << "a message to oneself";
  EXPECT_THROW(b.put(1, kNumStreams, b.in(0), 64), Error);
  EXPECT_THROW(b.put(1, 0, b.in(0), 65), Error);
  b.receive(1, 1, 64);
  EXPECT_THROW(b.done(), Error) << "received and not released";
}

}  // namespace
}  // namespace smddp::plan
