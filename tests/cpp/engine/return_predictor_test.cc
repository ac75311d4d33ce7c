// Tests when callers are predicted to come back for the work that they leave.
#include "engine/return_predictor.h"

#include <gtest/gtest.h>

namespace smddp::test {
namespace {

using engine::ReturnPredictor;

constexpr Nanoseconds kSoon = ReturnPredictor::kQuickReturn;

// Leaves and comes back `times` times. Returns the time at the end.
Nanoseconds leaveAndReturn(ReturnPredictor& predictor, Nanoseconds now, Nanoseconds away,
                           int times) {
  for (int i = 0; i < times; ++i) {
    predictor.left(now);
    now += away;
    predictor.returned(now);
  }
  return now;
}

TEST(ReturnPredictorTest, IsConfidentAfterSeveralQuickReturns) {
  ReturnPredictor predictor;
  leaveAndReturn(predictor, 0, kSoon - 1, ReturnPredictor::kReturnsNeeded - 1);
  EXPECT_FALSE(predictor.isConfident());
  leaveAndReturn(predictor, 0, kSoon - 1, 1);
  EXPECT_TRUE(predictor.isConfident());
}

TEST(ReturnPredictorTest, OneLateReturnEndsIt) {
  ReturnPredictor predictor;
  leaveAndReturn(predictor, 0, 1, 3 * ReturnPredictor::kReturnsNeeded);
  leaveAndReturn(predictor, 0, kSoon, 1);
  EXPECT_FALSE(predictor.isConfident());
  leaveAndReturn(predictor, 0, 1, ReturnPredictor::kReturnsNeeded - 1);
  EXPECT_FALSE(predictor.isConfident());
}

TEST(ReturnPredictorTest, CountsFromTheFirstThatWasLeft) {
  ReturnPredictor predictor;
  leaveAndReturn(predictor, 0, 1, ReturnPredictor::kReturnsNeeded);
  predictor.left(1000);
  predictor.left(1000 + kSoon - 1);  // like DDP's last bucket, just before DDP waits for all
  predictor.returned(1000 + kSoon);
  EXPECT_FALSE(predictor.isConfident());
}

TEST(ReturnPredictorTest, WhatEndsByItselfSaysNothing) {
  ReturnPredictor predictor;
  leaveAndReturn(predictor, 0, 1, ReturnPredictor::kReturnsNeeded - 1);
  predictor.left(0);
  predictor.ended();
  predictor.returned(10 * kSoon);
  EXPECT_FALSE(predictor.isConfident());
  leaveAndReturn(predictor, 0, 1, 1);
  EXPECT_TRUE(predictor.isConfident());
}

TEST(ReturnPredictorTest, ExpectsCallersWhoHaveJustLeftOrJustReturned) {
  ReturnPredictor predictor;
  predictor.left(0);
  EXPECT_FALSE(predictor.expectsReturn(1)) << "no predictor yet";
  predictor.returned(1);
  const Nanoseconds now = leaveAndReturn(predictor, 0, 1, ReturnPredictor::kReturnsNeeded);
  EXPECT_TRUE(predictor.expectsReturn(now)) << "returned";
  predictor.left(now);
  EXPECT_TRUE(predictor.expectsReturn(now + kSoon - 1));
  EXPECT_FALSE(predictor.expectsReturn(now + kSoon));
  predictor.missed();
  EXPECT_FALSE(predictor.isConfident());
}

TEST(ReturnPredictorTest, IsNotActiveWhenNothingHasBeenLeftForLong) {
  ReturnPredictor predictor;
  const Nanoseconds now = leaveAndReturn(predictor, 0, 1, ReturnPredictor::kReturnsNeeded);
  EXPECT_TRUE(predictor.isActive(now));
  EXPECT_FALSE(predictor.isActive(now + ReturnPredictor::kActive));
  EXPECT_TRUE(predictor.isConfident());
}

}  // namespace
}  // namespace smddp::test
