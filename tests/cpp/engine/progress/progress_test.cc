#include "engine/progress/progress.h"

#include <stdexcept>

#include <gtest/gtest.h>

namespace smddp::engine::progress {
namespace {

// No thread of its own, so actions stay in the inbox until the test becomes the owner.
class ProgressTest : public ::testing::Test {
 protected:
  Ownership ownership_;
  process::Process process_{process::Process::Options{}, ownership_};
  groups::GroupRegistry groups_{ownership_, process_};
  Progress progress_{ownership_, process_, groups_, /*hasThreads=*/false};
};

TEST_F(ProgressTest, CallThrowsWhatItsActionThrows) {
  EXPECT_THROW(progress_.call([] { throw std::runtime_error("mine"); }), std::runtime_error);
  EXPECT_FALSE(ownership_.isTaken());
}

TEST_F(ProgressTest, AnActionThatThrowsConcernsNoOtherAction) {
  bool isNextDone = false, isMineDone = false;
  progress_.leaveForOwner([] { throw std::runtime_error("of another thread"); });
  progress_.leaveForOwner([&] { isNextDone = true; });
  EXPECT_NO_THROW(progress_.call([&] { isMineDone = true; }));
  EXPECT_TRUE(isNextDone);
  EXPECT_TRUE(isMineDone);
  EXPECT_FALSE(ownership_.isTaken());
}

TEST_F(ProgressTest, PostLetsGoAfterAnActionThatThrows) {
  EXPECT_NO_THROW(progress_.post([] { throw std::runtime_error("of this thread"); }));
  EXPECT_FALSE(ownership_.isTaken());
}

TEST_F(ProgressTest, CompleteRunsWhatWaitsForTheCompletion) {
  calls::Completion completion;
  int numRuns = 0;
  completion.then([&] { ++numRuns; });
  progress_.complete(completion, Error(ErrorKind::Aborted, "enough"));
  EXPECT_EQ(numRuns, 1);
  ASSERT_TRUE(completion.done() && completion.error());
  EXPECT_EQ(completion.error()->kind(), ErrorKind::Aborted);
  EXPECT_FALSE(ownership_.isTaken());
}

}  // namespace
}  // namespace smddp::engine::progress
