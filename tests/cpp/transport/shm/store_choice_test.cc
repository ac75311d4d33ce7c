#include "transport/shm/store_choice.h"

#include <gtest/gtest.h>

namespace smddp::transport::shm {
namespace {

class ManualClock final : public Clock {
 public:
  Nanoseconds now() const override { return time; }
  Nanoseconds time = 0;
};

// Pieces that take as long as the test says.
struct Writer {
  explicit Writer(StagingStores stores = StagingStores::Auto) : choice(stores, clock) {}

  // Returns how many of them were streamed.
  int write(int pieces, Nanoseconds ordinary, Nanoseconds streaming, const void* work = nullptr,
            int64_t bytes = StoreChoice::kLongBytes) {
    int streamed = 0;
    for (int i = 0; i < pieces; ++i) {
      choice.write(work, bytes, [&](bool streams) {
        clock.time += streams ? streaming : ordinary;
        streamed += streams ? 1 : 0;
      });
    }
    return streamed;
  }

  ManualClock clock;
  StoreChoice choice;
};

// A comparison takes 65 pieces. Four comparisons with the same result decide.
TEST(StoreChoice, TakesWhatIsFaster) {
  Writer writer;
  EXPECT_FALSE(writer.choice.streams());
  EXPECT_EQ(writer.write(3 * 65, 400, 100), 3);
  EXPECT_FALSE(writer.choice.streams());
  EXPECT_EQ(writer.write(65, 400, 100), 1);
  EXPECT_TRUE(writer.choice.streams());
  EXPECT_EQ(writer.write(650, 400, 100), 640);
  EXPECT_TRUE(writer.choice.streams());
  EXPECT_EQ(writer.write(4 * 65, 100, 150), 256);
  EXPECT_FALSE(writer.choice.streams());
  EXPECT_EQ(writer.write(650, 100, 150), 10);
}

TEST(StoreChoice, StreamsOnlyWhatIsClearlyFasterSo) {
  Writer writer;
  writer.write(6500, 125, 100);
  EXPECT_FALSE(writer.choice.streams());
  writer.write(650, 126, 100);
  EXPECT_TRUE(writer.choice.streams());
}

TEST(StoreChoice, OneThatWasInterruptedChangesNothing) {
  Writer writer;
  for (int i = 0; i < 20; ++i) {
    writer.write(65, 1'000'000, 100);
    writer.write(130, 100, 150);
    ASSERT_FALSE(writer.choice.streams());
  }
  writer.write(650, 400, 100);
  for (int i = 0; i < 20; ++i) {
    writer.write(65, 400, 1'000'000);
    writer.write(130, 400, 100);
    ASSERT_TRUE(writer.choice.streams());
  }
}

// A copy and a sum take turns. One takes as long with streaming stores as the other with ordinary stores.
TEST(StoreChoice, ComparesOnlyWhatIsAlike) {
  const int works[2] = {};
  Writer writer;
  for (int i = 0; i < 1000; ++i) {
    writer.write(1, 100, 200, &works[0]);
    writer.write(1, 400, 800, &works[1]);
  }
  EXPECT_FALSE(writer.choice.streams());
  // Each piece has another length, so no two are equal.
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(writer.write(1, 400, 100, nullptr, StoreChoice::kLongBytes + i), 0);
  }
}

// A comparison is given up if no equal piece follows.
TEST(StoreChoice, GivesUpWhatHasNoLike) {
  const int work = 0;
  Writer writer;
  writer.write(63, 400, 100);
  writer.write(1, 400, 100, &work);
  EXPECT_EQ(writer.write(63, 400, 100), 0);
  EXPECT_EQ(writer.write(2, 400, 100), 1);
}

TEST(StoreChoice, IsOverruledByTheSetting) {
  Writer always(StagingStores::Streaming);
  EXPECT_EQ(always.write(1000, 100, 400), 1000);
  Writer never(StagingStores::Ordinary);
  EXPECT_EQ(never.write(1000, 400, 100), 0);
}

TEST(StoreChoice, ReadsTheSetting) {
  EXPECT_EQ(parseStagingStores("auto"), StagingStores::Auto);
  EXPECT_EQ(parseStagingStores("ordinary"), StagingStores::Ordinary);
  EXPECT_EQ(parseStagingStores("streaming"), StagingStores::Streaming);
}

}  // namespace
}  // namespace smddp::transport::shm
