// Tests which thread holds an ownership, and that a call without it ends the process.
#include "common/ownership.h"

#include <gtest/gtest.h>

#include <thread>

namespace smddp::test {
namespace {

TEST(OwnershipTest, HasOneOwnerAtATime) {
  Ownership ownership;
  EXPECT_FALSE(ownership.isTaken());
  ASSERT_TRUE(ownership.tryAcquire());
  EXPECT_TRUE(ownership.isTaken());
  EXPECT_FALSE(ownership.tryAcquire());
  ownership.assertOwned();
  ownership.letGo();
  EXPECT_FALSE(ownership.isTaken());
}

TEST(OwnershipTest, IsHandedFromThreadToThread) {
  Ownership ownership;
  int value = 0;
  const auto add = [&] {
    for (int i = 0; i < 1000; ++i) {
      while (!ownership.tryAcquire()) std::this_thread::yield();
      ownership.assertOwned();
      ++value;
      ownership.letGo();
    }
  };
  std::thread other(add);
  add();
  other.join();
  EXPECT_EQ(value, 2000);
}

TEST(OwnershipDeathTest, EndsTheProcessOfWhoIsNotTheOwner) {
  if (!SMDDP_CHECK_OWNERSHIP) GTEST_SKIP() << "checked in Debug builds and under sanitizers";
  Ownership ownership;
  EXPECT_DEATH(ownership.assertOwned(), "ownership_test.cc:.* does not own the engine");
  std::thread([&] { static_cast<void>(ownership.tryAcquire()); }).join();
  EXPECT_DEATH(ownership.assertOwned(), "does not own the engine");
}

}  // namespace
}  // namespace smddp::test
