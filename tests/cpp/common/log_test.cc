#include "common/log.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace smddp {
namespace {

// Code that reports an invalid setting may log, and may be noexcept.
TEST(LogDeathTest, LevelIsWarnWhileASettingIsInvalid) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto ask = [] {
    setenv("SMDDP_POOL_BYTES", "1", 1);
    std::exit(logLevel() == LogLevel::Warn ? 0 : 1);
  };
  EXPECT_EXIT(ask(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace smddp
