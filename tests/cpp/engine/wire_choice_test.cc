// Which wire format is worth what it loses.
#include "engine/wire_choice.h"

#include <gtest/gtest.h>

namespace smddp::engine {
namespace {

TEST(WireChoice, TakesAShorterFormatOnlyForAQuarterOfTheTime) {
  // By time of fp32, bf16, int8.
  EXPECT_EQ(worthwhile({12, 7, 6}), Wire::bf16);
  EXPECT_EQ(worthwhile({12, 7, 5}), Wire::int8);
  EXPECT_EQ(worthwhile({12, 10, 9}), Wire::int8) << "bf16 is not worth it, but int8 is";
  EXPECT_EQ(worthwhile({12, 10, 10}), Wire::fp32);
  EXPECT_EQ(worthwhile({12, 13, 14}), Wire::fp32);
}

}  // namespace
}  // namespace smddp::engine
