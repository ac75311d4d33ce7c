#include "plan/checker.h"

#include <gmock/gmock.h>

#include "plan/example_plans.h"

namespace smddp::plan {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Kind = Verdict::Kind;

const Nodes kOneNode = makeNodes(1, 3);
const Nodes kTwoNodes = makeNodes(2, 1);
// Four full chunks, and a last one that is no multiple of a granule.
constexpr int64_t kBytes = 4 * 128 + 36;

Verdict checkTimes(const Nodes& nodes, Execution execution, int times) {
  execution.elementBytes = 4;
  return check(nodes, smallLimits(), std::vector<Execution>(static_cast<size_t>(times), execution));
}

Execution throughSlots(Mistake mistake) {
  return Execution::allReduce(sumThroughSlots(kOneNode, smallLimits(), kBytes, mistake), kBytes);
}

Execution byExchange(Mistake mistake) {
  return Execution::allReduce(sumByExchange(kTwoNodes, smallLimits(), kBytes, mistake), kBytes);
}

Execution fromSlot(Mistake mistake, int64_t bytes = 128) {
  return Execution::broadcast(sendFromSlot(kTwoNodes, smallLimits(), bytes, mistake), bytes, 0);
}

void expectCorrect(const Verdict& verdict) {
  EXPECT_EQ(verdict.kind, Kind::Correct) << verdict.problem;
  EXPECT_EQ(verdict.problem, "");
}

void expectProblem(const Verdict& verdict, Kind kind, const ::testing::Matcher<std::string>& text) {
  EXPECT_EQ(verdict.kind, kind) << verdict.problem;
  EXPECT_THAT(verdict.problem, text);
}

TEST(Checker, AcceptsRightPlans) {
  for (const int times : {1, 2, 5}) {
    expectCorrect(checkTimes(kOneNode, throughSlots(Mistake::None), times));
    expectCorrect(checkTimes(kTwoNodes, byExchange(Mistake::None), times));
    expectCorrect(checkTimes(kTwoNodes, fromSlot(Mistake::None), times));
    expectCorrect(checkTimes(
        kOneNode, Execution::allReduce(sumInPlace(kOneNode, smallLimits(), kBytes, true), kBytes),
        times));
  }
}

TEST(Checker, AcceptsDifferentRightPlansInTurn) {
  const Execution inPlace =
      Execution::allReduce(sumInPlace(kOneNode, smallLimits(), kBytes, true), kBytes);
  const Execution staged = throughSlots(Mistake::None);
  expectCorrect(
      check(kOneNode, smallLimits(), std::vector{staged, inPlace, inPlace, staged, staged}));
  expectCorrect(check(kTwoNodes, smallLimits(),
                      std::vector{fromSlot(Mistake::None), byExchange(Mistake::None),
                                  fromSlot(Mistake::None), byExchange(Mistake::None)}));
}

TEST(Checker, FindsMissingWait) {
  expectProblem(checkTimes(kOneNode, throughSlots(Mistake::MissingWait), 1), Kind::Race,
                AllOf(HasSubstr("stage sum, block 0, trip 0"), HasSubstr("stage copy"),
                      HasSubstr("the slots of rank"), HasSubstr("nothing orders the two")));
}

TEST(Checker, FindsSlotReusedEarly) {
  // One more chunk is in flight than there are slots.
  expectProblem(checkTimes(kOneNode, throughSlots(Mistake::SlotReusedEarly), 1), Kind::Race,
                AllOf(HasSubstr("contributions slot"), HasSubstr("nothing orders the two")));
}

TEST(Checker, FindsContributionTwice) {
  expectProblem(checkTimes(kOneNode, throughSlots(Mistake::ContributionTwice), 1), Kind::WrongData,
                AllOf(HasSubstr("the wrong contributions"), HasSubstr("0' + 1' + 0'")));
}

TEST(Checker, FindsWrongOrderOnOneRank) {
  expectProblem(checkTimes(kOneNode, throughSlots(Mistake::OrderOnOneRank), 1), Kind::WrongData,
                AllOf(HasSubstr("2' + 1' + 0'"), HasSubstr("another rank has")));
  expectProblem(checkTimes(kTwoNodes, byExchange(Mistake::OrderOnOneRank), 1), Kind::WrongData,
                HasSubstr("another rank has"));
}

TEST(Checker, FindsAnotherOrderOnSomeElementsOnlyIfAsked) {
  // Each rank sums its own share in its own order. All ranks get the same result, but the shares differ in their order.
  const Nodes nodes = makeNodes(1, 2);
  auto plans = sumInPlace(nodes, smallLimits(), 256, true);
  std::swap(plans[1].refs[plans[1].steps[0].firstRef + 2],
            plans[1].refs[plans[1].steps[0].firstRef + 3]);
  Execution execution = Execution::allReduce(plans, 256);
  expectCorrect(checkTimes(nodes, execution, 3));
  execution.hasOneOrder = true;
  expectProblem(checkTimes(nodes, execution, 3), Kind::WrongData,
                AllOf(HasSubstr("output from 128 on is 1' + 0'"), HasSubstr("elsewhere")));
}

TEST(Checker, FindsMissingScales) {
  expectProblem(checkTimes(kOneNode, throughSlots(Mistake::NoPreScale), 1), Kind::WrongData,
                HasSubstr("without pre-scaling"));
  expectProblem(checkTimes(kOneNode, throughSlots(Mistake::NoFinalScale), 1), Kind::WrongData,
                HasSubstr("without its final scaling"));
}

TEST(Checker, FindsCounterSharedByTwoStages) {
  const Verdict verdict = checkTimes(kOneNode, throughSlots(Mistake::SharedCounter), 1);
  EXPECT_FALSE(verdict.ok());
  EXPECT_THAT(verdict.problem, HasSubstr("signal c1"));
}

TEST(Checker, FindsPlanThatEndsWithoutSeeingTheArrival) {
  expectProblem(checkTimes(kOneNode, throughSlots(Mistake::NoArrival), 1), Kind::Malformed,
                HasSubstr("rank 0: the preamble does not wait for the team's arrival"));
}

TEST(Checker, FindsDeadlockAndNamesWhatIsMissing) {
  expectProblem(checkTimes(kOneNode, throughSlots(Mistake::TooFewSignals), 1), Kind::Deadlock,
                AllOf(HasSubstr("rank 0, stage sum, block 1, trip 0"),
                      HasSubstr("counter 1 of rank 1 is 4")));
  expectProblem(checkTimes(kTwoNodes, byExchange(Mistake::MissingRelease), 1), Kind::Deadlock,
                AllOf(HasSubstr("rank 0, stage send, block 0, trip 2"), HasSubstr("no credit"),
                      HasSubstr("0 released, window 2")));
}

TEST(Checker, FindsMissingReleaseEvenWhereCreditSuffices) {
  const int64_t bytes = 128;
  const Execution execution = Execution::allReduce(
      sumByExchange(kTwoNodes, smallLimits(), bytes, Mistake::MissingRelease), bytes);
  expectProblem(checkTimes(kTwoNodes, execution, 1), Kind::Malformed, HasSubstr("0 releases"));
}

TEST(Checker, FindsPutSourceOverwrittenWithoutFlush) {
  expectProblem(checkTimes(kTwoNodes, byExchange(Mistake::MissingFlush), 1), Kind::Race,
                AllOf(HasSubstr("stage send"), HasSubstr("put to rank"),
                      HasSubstr("nothing orders the two")));
}

TEST(Checker, FindsMessagePostedWhereAPutReads) {
  Execution execution = byExchange(Mistake::PostedTooEarly);
  expectProblem(checkTimes(kTwoNodes, execution, 1), Kind::Race,
                AllOf(HasSubstr("(put to rank 1 <- in[0, +128), message 1) writes"),
                      HasSubstr("nothing orders the two")));
  execution.inPlace.assign(2, false);
  expectCorrect(checkTimes(kTwoNodes, execution, 3));
}

TEST(Checker, FindsMessageReadBeforeItIsReceived) {
  expectProblem(checkTimes(kTwoNodes, byExchange(Mistake::NoReceive), 1), Kind::Race,
                HasSubstr("message"));
}

TEST(Checker, FindsLengthsThatDiffer) {
  expectProblem(checkTimes(kTwoNodes, byExchange(Mistake::LengthsDiffer), 1), Kind::Malformed,
                AllOf(HasSubstr("receive from rank 0"), HasSubstr("sent 128 bytes")));
}

TEST(Checker, FindsWhatOnlyTheNextExecutionsReveal) {
  // The window has two slots, so the slot of a message is used again two messages later.
  expectCorrect(checkTimes(kTwoNodes, fromSlot(Mistake::ReadAfterRelease), 2));
  expectProblem(checkTimes(kTwoNodes, fromSlot(Mistake::ReadAfterRelease), 3), Kind::Race,
                AllOf(HasSubstr("execution 2"), HasSubstr("execution 0"), HasSubstr("message")));
  // The staging half is used again two executions later.
  expectCorrect(checkTimes(kTwoNodes, fromSlot(Mistake::MissingFlush), 2));
  expectProblem(checkTimes(kTwoNodes, fromSlot(Mistake::MissingFlush), 3), Kind::Race,
                AllOf(HasSubstr("execution 2"), HasSubstr("execution 0"), HasSubstr("slots of")));
}

TEST(Checker, FindsBufferUsedAfterTheCallerHasItBack) {
  const Execution execution =
      Execution::allReduce(sumInPlace(kOneNode, smallLimits(), kBytes, false), kBytes);
  expectProblem(checkTimes(kOneNode, execution, 1), Kind::Race, HasSubstr("the caller of rank"));
}

TEST(Checker, FindsBrokenRules) {
  expectProblem(checkTimes(kOneNode, throughSlots(Mistake::WriteMatesSlot), 1), Kind::Malformed,
                HasSubstr("only outputs and own slots may be written"));
  expectProblem(checkTimes(kOneNode, throughSlots(Mistake::OutsideBuffer), 1), Kind::Malformed,
                HasSubstr("outside the 548 bytes"));

  Execution execution = throughSlots(Mistake::None);
  execution.plans[1].pools[0].slots = 1;
  expectProblem(checkTimes(kOneNode, execution, 1), Kind::Malformed, HasSubstr("its pools differ"));

  execution = byExchange(Mistake::None);
  ++execution.plans[0].channels[0].puts;
  expectProblem(checkTimes(kTwoNodes, execution, 1), Kind::Malformed,
                HasSubstr("rank 0 declares 6 messages to rank 1, which expects 5"));

  execution = Execution::allReduce(sumInPlace(kOneNode, smallLimits(), kBytes, true), kBytes);
  for (Plan& plan : execution.plans) plan.zeroCopy = false;
  expectProblem(checkTimes(kOneNode, execution, 1), Kind::Malformed, HasSubstr("not zero-copy"));
  execution.plans[0].zeroCopy = true;
  expectProblem(checkTimes(kOneNode, execution, 1), Kind::Malformed,
                HasSubstr("zero-copy here but not on rank 0"));

  Builder b(Topology({{0}}, 0), smallLimits(), "moves early");
  b.shareBuffers();
  const uint8_t pool = b.pool("slots", 1, 64);
  b.copy({b.slot(pool, 0, 0, 0)}, b.in(0), 64);
  b.arrive();
  expectProblem(checkTimes({{0}}, Execution::allReduce({b.done()}, 64), 1), Kind::Malformed,
                HasSubstr("moves before the arrival"));
}

TEST(Checker, FindsResidualsThatNobodyCanUse) {
  const auto execution = [](bool encodes, int64_t residualOffset) {
    std::vector<Plan> plans;
    for (Rank r = 0; r < 2; ++r) {
      const Topology t(kTwoNodes, r);
      Builder b(t, {}, "with residual");
      b.setWire(Wire::int8);
      const uint8_t pool = b.pool("encoded", 1, 1024);
      b.arrive();
      b.stage("only");
      Ref slot = b.slot(pool, 0, 0, 0);
      if (encodes) slot = b.encoded(slot);
      b.copy({slot}, b.in(0), 1024, {.pre = true}, b.residual(residualOffset));
      plans.push_back(b.done());
    }
    return Execution::allReduce(std::move(plans), 1024);
  };
  expectProblem(checkTimes(kTwoNodes, execution(false, 0), 1), Kind::Malformed,
                HasSubstr("a residual of what is not encoded"));
  expectProblem(checkTimes(kTwoNodes, execution(true, 64), 1), Kind::Malformed,
                HasSubstr("outside the 1024 bytes"));
}

TEST(Checker, LetsLanesShareAChannelInTheOrderOfNumbers) {
  const auto build = [](bool inTurn) {
    std::vector<Plan> plans;
    for (Rank r = 0; r < 2; ++r) {
      Builder b(Topology(kTwoNodes, r), smallLimits(), "two senders");
      b.arrive();
      b.stage("first");
      if (r == 0) b.put(1, 0, b.in(0), 64);
      b.stage("second");
      if (r == 0) {
        b.put(1, 0, b.in(64), 64);
        b.flush(1, 0);
      }
      for (int i = 0; r == 1 && i < 2; ++i) {
        const Ref message = b.receive(0, 0, 64);
        b.copy({b.out(64 * i)}, message, 64);
        b.release(0, 0);
      }
      plans.push_back(b.done());
    }
    // Without the first lane, the second one waits for ever.
    if (!inTurn) plans[0].lanes.erase(plans[0].lanes.begin());
    return Execution::broadcast(plans, 128, 0);
  };
  expectCorrect(checkTimes(kTwoNodes, build(true), 3));
  expectProblem(checkTimes(kTwoNodes, build(false), 1), Kind::Deadlock,
                AllOf(HasSubstr("rank 0, stage second"), HasSubstr("0 messages have been put")));
}

TEST(Checker, FindsBarrierThatLetsThrough) {
  // The arrival is a barrier within a node, not between nodes.
  const auto arriveOnly = [](const Nodes& nodes) {
    std::vector<Plan> plans;
    const Topology first(nodes, 0);
    for (Rank r = 0; r < first.numRanks(); ++r) {
      Builder b(first.seenBy(r), smallLimits(), "arrive");
      b.arrive();
      plans.push_back(b.done());
    }
    return Execution::barrier(plans);
  };
  expectCorrect(checkTimes(kOneNode, arriveOnly(kOneNode), 3));
  expectProblem(checkTimes(kTwoNodes, arriveOnly(kTwoNodes), 1), Kind::Malformed,
                HasSubstr("leaves the barrier"));
}

TEST(Checker, FindsStaleAndMissingData) {
  // Nobody writes one of the outputs; then a broadcast from the wrong root.
  Execution execution =
      Execution::allGather(sendFromSlot(kTwoNodes, smallLimits(), 64, Mistake::None), 64);
  expectProblem(checkTimes(kTwoNodes, execution, 1), Kind::WrongData, HasSubstr("nothing"));
  execution = fromSlot(Mistake::None, 64);
  for (Expectation& expected : execution.expectations) expected.contributions = {{1, 0}};
  expectProblem(checkTimes(kTwoNodes, execution, 1), Kind::WrongData,
                HasSubstr("the wrong contributions"));
}

}  // namespace
}  // namespace smddp::plan
