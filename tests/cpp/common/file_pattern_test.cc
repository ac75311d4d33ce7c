#include "common/file_pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "common/error.h"

namespace smddp {
namespace {

TEST(FilePattern, HasHostProcessAndRank) {
  const FilePattern pattern{"/tmp/%h/a%%b-%p.%r"};
  pattern.check("SMDDP_X");
  EXPECT_EQ(pattern.path(12), "/tmp/" + hostName() + "/a%b-" + std::to_string(getpid()) + ".12");
  EXPECT_TRUE(pattern.names('r'));
  EXPECT_TRUE(pattern.names('h'));
  // In "%%b" the letter is no letter of ours.
  EXPECT_FALSE(pattern.names('b'));
}

TEST(FilePattern, HasNoPathWithoutTheRankThatItNames) {
  EXPECT_EQ(FilePattern{"a%r"}.path(-1), std::nullopt);
  EXPECT_EQ(FilePattern{"a%%r"}.path(-1), "a%r");
  EXPECT_EQ(FilePattern{"plain"}.path(-1), "plain");
}

TEST(FilePattern, RefusesOtherLetters) {
  for (const char* text : {"a%", "%x", "%%%", "%1r"}) {
    SCOPED_TRACE(text);
    try {
      FilePattern{text}.check("SMDDP_X");
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::Usage);
      EXPECT_THAT(error.what(), testing::HasSubstr(std::string("SMDDP_X=") + text + ": expects"));
    }
  }
}

}  // namespace
}  // namespace smddp
