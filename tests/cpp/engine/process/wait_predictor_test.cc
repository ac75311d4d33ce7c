// Tests when callers are predicted to come back for the work that they leave.
#include "engine/process/wait_predictor.h"

#include <gtest/gtest.h>

namespace smddp::test {
namespace {

using engine::process::WaitPredictor;

constexpr Nanoseconds kSoon = WaitPredictor::kQuickReturn;

// Leaves and comes back `times` times. Returns the time at the end.
Nanoseconds leaveAndReturn(WaitPredictor& predictor, Nanoseconds now, Nanoseconds away, int times) {
  for (int i = 0; i < times; ++i) {
    predictor.noteWorkLeft(now);
    now += away;
    predictor.cameBack(now);
  }
  return now;
}

TEST(WaitPredictorTest, IsConfidentAfterSeveralQuickReturns) {
  WaitPredictor predictor;
  leaveAndReturn(predictor, 0, kSoon - 1, WaitPredictor::kReturnsNeeded - 1);
  EXPECT_FALSE(predictor.isConfident());
  leaveAndReturn(predictor, 0, kSoon - 1, 1);
  EXPECT_TRUE(predictor.isConfident());
}

TEST(WaitPredictorTest, OneLateReturnEndsIt) {
  WaitPredictor predictor;
  leaveAndReturn(predictor, 0, 1, 3 * WaitPredictor::kReturnsNeeded);
  leaveAndReturn(predictor, 0, kSoon, 1);
  EXPECT_FALSE(predictor.isConfident());
  leaveAndReturn(predictor, 0, 1, WaitPredictor::kReturnsNeeded - 1);
  EXPECT_FALSE(predictor.isConfident());
}

TEST(WaitPredictorTest, CountsFromTheFirstThatWasLeft) {
  WaitPredictor predictor;
  leaveAndReturn(predictor, 0, 1, WaitPredictor::kReturnsNeeded);
  predictor.noteWorkLeft(1000);
  predictor.noteWorkLeft(1000 + kSoon -
                         1);  // like DDP's last bucket, just before DDP waits for all
  predictor.cameBack(1000 + kSoon);
  EXPECT_FALSE(predictor.isConfident());
}

TEST(WaitPredictorTest, WhatEndsByItselfSaysNothing) {
  WaitPredictor predictor;
  leaveAndReturn(predictor, 0, 1, WaitPredictor::kReturnsNeeded - 1);
  predictor.noteWorkLeft(0);
  predictor.ended();
  predictor.cameBack(10 * kSoon);
  EXPECT_FALSE(predictor.isConfident());
  leaveAndReturn(predictor, 0, 1, 1);
  EXPECT_TRUE(predictor.isConfident());
}

TEST(WaitPredictorTest, ExpectsCallersWhoHaveJustLeftOrJustReturned) {
  WaitPredictor predictor;
  predictor.noteWorkLeft(0);
  EXPECT_FALSE(predictor.expectsReturn(1)) << "no predictor yet";
  predictor.cameBack(1);
  const Nanoseconds now = leaveAndReturn(predictor, 0, 1, WaitPredictor::kReturnsNeeded);
  EXPECT_TRUE(predictor.expectsReturn(now)) << "returned";
  predictor.noteWorkLeft(now);
  EXPECT_TRUE(predictor.expectsReturn(now + kSoon - 1));
  EXPECT_FALSE(predictor.expectsReturn(now + kSoon));
  predictor.didNotComeBack();
  EXPECT_FALSE(predictor.isConfident());
}

TEST(WaitPredictorTest, IsNotActiveWhenNothingHasBeenLeftForLong) {
  WaitPredictor predictor;
  const Nanoseconds now =
      leaveAndReturn(predictor, 2 * WaitPredictor::kActive, 1, WaitPredictor::kReturnsNeeded);
  EXPECT_TRUE(predictor.isActive(now));
  EXPECT_FALSE(predictor.isActive(now + WaitPredictor::kActive));
  EXPECT_TRUE(predictor.isConfident());
}

}  // namespace
}  // namespace smddp::test
