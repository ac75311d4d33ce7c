#include "transport/fabric/reassembly.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/error.h"
#include "transport/recording_sink.h"

namespace smddp::transport::testing {
namespace {

// A registry of one region. It needs no provider, because without remote writes a region is a key with bounds.
struct ReassemblyTest : ::testing::Test {
  ReassemblyTest() : key(registry.add(memory)) {}
  fabric::FragmentHeader fragment(uint64_t number, uint64_t total, uint64_t offset) const {
    return {fabric::MessageKind::Fragment, 5, 77, 0, number, {key, 16}, total, offset};
  }
  std::vector<std::byte> memory = std::vector<std::byte>(1000);
  fid_domain unused{};
  fabric::Registry registry{unused, nullptr, /*mrMode=*/0, /*remote=*/false};
  fabric::Reassembly reassembly{registry};
  RemoteKey key;
};

TEST_F(ReassemblyTest, FragmentsMayComeInAnyOrderAndInterleave) {
  const auto whole = pattern(300, 1);
  EXPECT_FALSE(reassembly.accept(fragment(1, 300, 200), Bytes(whole).subspan(200)));
  EXPECT_TRUE(reassembly.accept(fragment(2, 10, 0), Bytes(whole).first(10)));
  EXPECT_FALSE(reassembly.accept(fragment(1, 300, 0), Bytes(whole).first(100)));
  EXPECT_TRUE(reassembly.accept(fragment(1, 300, 100), Bytes(whole).subspan(100, 100)));
  EXPECT_TRUE(std::equal(whole.begin(), whole.end(), memory.begin() + 16));
}

TEST_F(ReassemblyTest, RefusesWhatIsOutsideOrContradicts) {
  const auto bytes = pattern(100, 1);
  EXPECT_THROW(reassembly.accept(fragment(1, 985, 900), bytes), Error) << "beyond the region";
  EXPECT_THROW(reassembly.accept(fragment(1, ~0ull, 0), bytes), Error) << "sum overflows";
  EXPECT_THROW(reassembly.accept(fragment(1, 300, ~0ull - 20), bytes), Error) << "offset overflows";
  EXPECT_THROW(reassembly.accept(fragment(1, 99, 0), bytes), Error) << "more than the put";
  EXPECT_THROW(reassembly.accept(fragment(1, 99, 0), {}), Error) << "nothing";
  auto wrongKey = fragment(1, 300, 0);
  wrongKey.slot.target.key += 1;
  EXPECT_THROW(reassembly.accept(wrongKey, bytes), Error);
  EXPECT_THAT(memory, ::testing::Each(std::byte{0})) << "nothing was written";

  EXPECT_FALSE(reassembly.accept(fragment(1, 300, 0), bytes));
  EXPECT_THROW(reassembly.accept(fragment(1, 400, 100), bytes), Error) << "another total";
  EXPECT_FALSE(reassembly.accept(fragment(1, 300, 100), bytes));
  EXPECT_TRUE(reassembly.accept(fragment(1, 300, 200), bytes));
}

}  // namespace
}  // namespace smddp::transport::testing
