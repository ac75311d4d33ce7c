// When callers are expected to come back for what they have left, and when no longer.
#include "engine/habit.h"

#include <gtest/gtest.h>

namespace smddp::test {
namespace {

using engine::Habit;

constexpr Nanoseconds kSoon = Habit::kSoon;

// Leaves and comes back, `times` over; returns when.
Nanoseconds leaveAndReturn(Habit& habit, Nanoseconds now, Nanoseconds away, int times) {
  for (int i = 0; i < times; ++i) {
    habit.left(now);
    now += away;
    habit.returned(now);
  }
  return now;
}

TEST(HabitTest, SettlesAfterSeveralQuickReturns) {
  Habit habit;
  leaveAndReturn(habit, 0, kSoon - 1, Habit::kSettled - 1);
  EXPECT_FALSE(habit.isSettled());
  leaveAndReturn(habit, 0, kSoon - 1, 1);
  EXPECT_TRUE(habit.isSettled());
}

TEST(HabitTest, OneLateReturnEndsIt) {
  Habit habit;
  leaveAndReturn(habit, 0, 1, 3 * Habit::kSettled);
  leaveAndReturn(habit, 0, kSoon, 1);
  EXPECT_FALSE(habit.isSettled());
  leaveAndReturn(habit, 0, 1, Habit::kSettled - 1);
  EXPECT_FALSE(habit.isSettled());
}

TEST(HabitTest, CountsFromTheFirstThatWasLeft) {
  Habit habit;
  leaveAndReturn(habit, 0, 1, Habit::kSettled);
  habit.left(1000);
  habit.left(1000 + kSoon - 1);  // as DDP's last bucket, just before it waits for all
  habit.returned(1000 + kSoon);
  EXPECT_FALSE(habit.isSettled());
}

TEST(HabitTest, WhatEndsByItselfSaysNothing) {
  Habit habit;
  leaveAndReturn(habit, 0, 1, Habit::kSettled - 1);
  habit.left(0);
  habit.ended();
  habit.returned(10 * kSoon);
  EXPECT_FALSE(habit.isSettled());
  leaveAndReturn(habit, 0, 1, 1);
  EXPECT_TRUE(habit.isSettled());
}

TEST(HabitTest, ExpectsWhoHasJustLeftAndWhoHasJustReturned) {
  Habit habit;
  habit.left(0);
  EXPECT_FALSE(habit.expects(1)) << "no habit yet";
  habit.returned(1);
  const Nanoseconds now = leaveAndReturn(habit, 0, 1, Habit::kSettled);
  EXPECT_TRUE(habit.expects(now)) << "returned";
  habit.left(now);
  EXPECT_TRUE(habit.expects(now + kSoon - 1));
  EXPECT_FALSE(habit.expects(now + kSoon));
  habit.missed();
  EXPECT_FALSE(habit.isSettled());
}

TEST(HabitTest, NobodyNeedsToLookWhenNothingIsLeftForLong) {
  Habit habit;
  const Nanoseconds now = leaveAndReturn(habit, 0, 1, Habit::kSettled);
  EXPECT_TRUE(habit.isActive(now));
  EXPECT_FALSE(habit.isActive(now + Habit::kActive));
  EXPECT_TRUE(habit.isSettled());
}

}  // namespace
}  // namespace smddp::test
