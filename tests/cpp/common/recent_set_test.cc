#include "common/recent_set.h"

#include <gtest/gtest.h>

namespace smddp {
namespace {

TEST(RecentSet, ForgetsWhatWasAddedFirst) {
  RecentSet set(3);
  for (const uint64_t number : {7, 8, 9}) EXPECT_TRUE(set.insert(number));
  EXPECT_FALSE(set.insert(7)) << "it is in the set, and stays the oldest";
  EXPECT_TRUE(set.insert(10));
  EXPECT_FALSE(set.contains(7));
  for (const uint64_t number : {8, 9, 10}) EXPECT_TRUE(set.contains(number));
  EXPECT_TRUE(set.insert(7));
  EXPECT_FALSE(set.contains(8));
}

}  // namespace
}  // namespace smddp
