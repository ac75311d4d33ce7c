#include "transport/fabric/early_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "transport/recording_sink.h"

namespace smddp::transport::testing {
namespace {

TEST(EarlyMessages, RestoresTheOrderOfOneSender) {
  fabric::EarlyMessages early;
  RecordingSink sink;
  early.introduce(9, 4);
  for (const uint64_t sequence : {2, 0, 3, 1, 1, 5})
    early.arrived(9, sequence, pattern(10, sequence), sink);
  ASSERT_EQ(sink.controls.size(), 4u);
  for (uint32_t i = 0; i < 4; ++i)
    EXPECT_EQ(sink.controls[i], std::make_pair(PeerId{4}, pattern(10, i)));
}

TEST(EarlyMessages, BacklogOfAnUnknownSenderIsDeliveredFirst) {
  fabric::EarlyMessages early;
  RecordingSink sink;
  for (const uint64_t sequence : {1, 0}) early.arrived(9, sequence, pattern(10, sequence), sink);
  early.introduce(9, 0);
  early.arrived(9, 2, pattern(10, 2), sink);
  early.deliverIntroduced(sink);
  ASSERT_EQ(sink.controls.size(), 3u);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(sink.controls[i].second, pattern(10, i));
}

TEST(EarlyMessages, SenderThatFloodsIsReportedOnceItIsKnown) {
  fabric::EarlyMessages early;
  RecordingSink sink;
  for (uint64_t i = 0; i <= fabric::EarlyMessages::kMaxFromUnknown; ++i)
    early.arrived(9, i, pattern(1, 0), sink);
  EXPECT_TRUE(early.takeOverflowed().empty()) << "nobody knows whom to report";
  early.introduce(9, 3);
  EXPECT_THAT(early.takeOverflowed(), ::testing::ElementsAre(3));
  EXPECT_TRUE(early.takeOverflowed().empty());
}

}  // namespace
}  // namespace smddp::transport::testing
