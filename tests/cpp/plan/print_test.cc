#include "plan/print.h"

#include <gmock/gmock.h>

#include "plan/builder.h"

namespace smddp::plan {
namespace {

using ::testing::HasSubstr;

// Sends two chunks through a slot to the other node, and sums what comes back.
Plan samplePlan(const Topology& t) {
  Limits limits;
  limits.messageBytes = 128;
  Builder b(t, limits, "sample");
  const uint8_t pool = b.pool("staged", 3, 128);
  b.arrive();
  b.eachChunk(256, 128, [&](const Chunk& c) {
    b.stage("send");
    b.waitMates(2, c.index - 2);
    b.copy({b.slot(pool, t.myLocal(), c.index + 1, 0)}, b.in(c.offset), c.length);
    b.put(2, 1, b.slot(pool, t.myLocal(), c.index + 1, 0), c.length);
    b.flush(2, 1);
    b.stage("sum");
    const Ref other = b.receive(2, 1, c.length);
    b.reduce({b.out(c.offset)}, {b.in(c.offset), other}, c.length, {true, true});
    b.release(2, 1);
    b.signal(2, c.index + 1);
  });
  return b.done();
}

TEST(Print, SaysWhatThePlanDoes) {
  const Topology t({{0, 1}, {2, 3}}, 0);
  EXPECT_EQ(print(samplePlan(t), t),
            "sample, rank 0 of 4 (node 0 of 2, local 0)\n"
            "  pool staged: 3 x 128 bytes\n"
            "  channel with rank 2, stream 1, messages: 2 out, 2 in\n"
            "  preamble\n"
            "    signal arrival = 1\n"
            "    wait arrival of the team >= 1\n"
            "  stage send\n"
            "    2 x\n"
            "      wait c2 of the team >= k-2\n"
            "      copy mate 0's staged slot (k+1)%3 [0, +128) <- in[128k, +128)\n"
            "      put to rank 2 stream 1 <- mate 0's staged slot (k+1)%3 [0, +128), message k+1\n"
            "      flush to rank 2 stream 1 up to message k+1\n"
            "  stage sum\n"
            "    2 x\n"
            "      receive from rank 2 stream 1 128 bytes, message k+1\n"
            "      reduce out[128k, +128) <- in[128k, +128), rank 2 stream 1 message k+1 "
            "[0, +128), pre-scaled, final\n"
            "      release to rank 2 stream 1 up to message k+1\n"
            "      signal c2 = k+1\n"
            "  total: 18 steps, 2 messages with 256 bytes, 256 bytes copied, 512 reduced\n");
}

TEST(Print, PutsTheTripIn) {
  const Topology t({{0, 1}, {2, 3}}, 0);
  const Plan plan = samplePlan(t);
  const Step& copy = plan.steps[plan.lanes[0].blocks[0].firstStep + 1];
  EXPECT_EQ(printStepAt(plan, copy, 5), "copy mate 0's staged slot 0 [0, +128) <- in[640, +128)");
}

// All steps print the same number for the same message.
TEST(Print, NumbersAMessageAlikeInEveryStep) {
  const Topology t({{0, 1}, {2, 3}}, 0);
  const Plan plan = samplePlan(t);
  const auto inTrip = [&](size_t lane, size_t step) {
    return printStepAt(plan, plan.steps[plan.lanes[lane].blocks[0].firstStep + step], 1);
  };
  for (const std::string& text :
       {inTrip(0, 2), inTrip(0, 3), inTrip(1, 0), inTrip(1, 1), inTrip(1, 2)}) {
    EXPECT_THAT(text, HasSubstr("message 2")) << text;
  }
}

TEST(Print, NamesMatesBuffersAndNegativeSlopes) {
  const Topology t({{0, 1}}, 0);
  Builder b(t, {}, "zero");
  b.arrive();
  b.eachChunk(256, 128, [&](const Chunk& c) {
    b.stage("only");
    b.copy({b.mateOut(1, 128 - c.offset)}, b.mateIn(1, 128 - c.offset), c.length);
    b.waitRank(1, 3, 7 - c.index);
  });
  const std::string text = print(b.done(), t);
  EXPECT_THAT(text, HasSubstr("local 0), zero-copy\n"));
  EXPECT_THAT(text,
              HasSubstr("copy mate 1's out[-128k+128, +128) <- mate 1's in[-128k+128, +128)"));
  EXPECT_THAT(text, HasSubstr("wait c3 of mate 1 >= -k+7"));
}

TEST(Print, NamesEncodedRangesAndTheResidual) {
  const Topology t({{0}, {1}}, 0);
  Builder b(t, {}, "encoded");
  b.setWire(Wire::int8);
  const uint8_t pool = b.pool("encoded shards", 2, b.encodedLength(2048));
  b.arrive();
  b.eachChunk(4096, 2048, [&](const Chunk& c) {
    b.stage("only");
    b.copy({b.encoded(b.slot(pool, 0, c.index, 0))}, b.in(c.offset), c.length, {},
           b.residual(c.offset));
  });
  // 512 elements are 2 blocks: 512 + 2 * 4 bytes.
  EXPECT_THAT(print(b.done(), t),
              HasSubstr("copy mate 0's encoded shards slot k%2 [0, +520 int8) <- in[2048k, +2048), "
                        "with residual[2048k, +2048)\n"));
}

TEST(Totals, CountAllTrips) {
  const Topology t({{0, 1}, {2, 3}}, 0);
  const Totals sum = totals(samplePlan(t));
  EXPECT_EQ(sum.steps, 18);
  EXPECT_EQ(sum.messages, 2);
  EXPECT_EQ(sum.bytesPut, 256);
  EXPECT_EQ(sum.bytesCopied, 256);
  EXPECT_EQ(sum.bytesReduced, 512);
}

}  // namespace
}  // namespace smddp::plan
