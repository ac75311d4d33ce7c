#include "transport/fabric/inbox.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "transport/recording_sink.h"

namespace smddp::transport::testing {
namespace {

TEST(Inbox, RestoresTheOrderOfOneSender) {
  fabric::Inbox inbox;
  RecordingSink sink;
  inbox.introduce(9, 4);
  for (const uint64_t sequence : {2, 0, 3, 1, 1, 5})
    inbox.arrived(9, sequence, pattern(10, sequence), sink);
  ASSERT_EQ(sink.controls.size(), 4u);
  for (uint32_t i = 0; i < 4; ++i)
    EXPECT_EQ(sink.controls[i], std::make_pair(PeerId{4}, pattern(10, i)));
}

TEST(Inbox, BacklogOfAnUnknownSenderIsDeliveredFirst) {
  fabric::Inbox inbox;
  RecordingSink sink;
  for (const uint64_t sequence : {1, 0}) inbox.arrived(9, sequence, pattern(10, sequence), sink);
  inbox.introduce(9, 0);
  inbox.arrived(9, 2, pattern(10, 2), sink);
  inbox.deliverIntroduced(sink);
  ASSERT_EQ(sink.controls.size(), 3u);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(sink.controls[i].second, pattern(10, i));
}

TEST(Inbox, SenderThatFloodsIsReportedOnceItIsKnown) {
  fabric::Inbox inbox;
  RecordingSink sink;
  for (uint64_t i = 0; i <= fabric::Inbox::kMaxFromUnknown; ++i)
    inbox.arrived(9, i, pattern(1, 0), sink);
  EXPECT_TRUE(inbox.takeOverflowed().empty()) << "nobody knows whom to report";
  inbox.introduce(9, 3);
  EXPECT_THAT(inbox.takeOverflowed(), ::testing::ElementsAre(3));
  EXPECT_TRUE(inbox.takeOverflowed().empty());
}

}  // namespace
}  // namespace smddp::transport::testing
