#include "common/log.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

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

std::string contentOf(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Before the rank is known, lines of a file that its name needs go to the standard error. A child of a fork has its own
// file.
TEST(LogDeathTest, FilesAreThoseOfTheProcessAndItsRank) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto folder =
      std::filesystem::temp_directory_path() / ("smddp-log-test-" + std::to_string(getpid()));
  const auto log = [&] {
    std::filesystem::create_directory(folder);
    unsetenv("RANK");
    setenv("SMDDP_LOG_FILE", (folder / "%p-%r").c_str(), 1);
    writeLog(LogLevel::Warn, "test", "early");
    setLogRank(3);
    writeLog(LogLevel::Warn, "test", "parent");
    const pid_t child = fork();
    writeLog(LogLevel::Warn, "test", child == 0 ? "child" : "parent again");
    if (child == 0) _exit(0);
    waitpid(child, nullptr, 0);
    const bool isRight =
        contentOf(folder / (std::to_string(getpid()) + "-3")) ==
            "smddp[rank 3][test] warn: parent\nsmddp[rank 3][test] warn: parent again\n" &&
        contentOf(folder / (std::to_string(child) + "-3")) == "smddp[rank 3][test] warn: child\n";
    std::filesystem::remove_all(folder);
    std::exit(isRight ? 0 : 1);
  };
  EXPECT_EXIT(log(), testing::ExitedWithCode(0), "^smddp\\[test\\] warn: early\n$");
}

TEST(LogDeathTest, TheLauncherMayTellTheRank) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto ask = [] {
    setenv("RANK", "12", 1);
    const bool knows = processRank() == 12;
    setenv("RANK", "12x", 1);
    const bool doubts = processRank() == -1;
    setLogRank(5);
    std::exit(knows && doubts && processRank() == 5 ? 0 : 1);
  };
  EXPECT_EXIT(ask(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace smddp
