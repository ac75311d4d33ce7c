// Messages longer than 2^31 bytes, inside a node and between two. Buffers that are only read are a few pages that are
// mapped repeatedly, so that the test needs memory for the written buffer only: 2 GiB.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <new>

#include "engine/calls.h"
#include "support/ranks.h"
#include "support/watchdog.h"

namespace smddp::test {
namespace {

constexpr size_t kPage = 4096;
// Contents repeat after this many bytes. No chunk is a multiple of it.
constexpr size_t kPeriod = 4093 * kPage;
constexpr size_t kBytes = (size_t{1} << 31) + 3 * kPage + 1;

using Period = std::vector<uint8_t>;

Period periodOf(Rank rank) {
  Period period(kPeriod);
  uint32_t state = 12345 + static_cast<uint32_t>(rank);
  for (uint8_t& byte : period)
    byte = static_cast<uint8_t>((state = state * 1664525 + 1013904223) >> 24);
  return period;
}

// kBytes of address space in which a period is mapped repeatedly.
class Memory {
 public:
  enum class Kind { Repeated, Whole };

  Memory(const Period& period, Kind kind) {
    void* place = mmap(nullptr, kMapped, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<std::byte*>(place);
    if (kind == Kind::Whole) {
      for (size_t at = 0; at < kBytes; at += kPeriod) {
        std::memcpy(data_ + at, period.data(), std::min(kPeriod, kBytes - at));
      }
      return;
    }
    const int file = memfd_create("period", 0);
    if (pwrite(file, period.data(), kPeriod, 0) != static_cast<ssize_t>(kPeriod)) std::abort();
    for (size_t at = 0; at < kBytes; at += kPeriod) {
      if (mmap(data_ + at, kPeriod, PROT_READ, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
        std::abort();
      }
    }
    close(file);
  }
  ~Memory() { munmap(data_, kMapped); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Bytes bytes() { return {data_, kBytes}; }
  // The position of the first byte that differs from the period, or kBytes.
  size_t firstDifference(const Period& period) const {
    for (size_t at = 0; at < kBytes; at += kPeriod) {
      const size_t length = std::min(kPeriod, kBytes - at);
      if (std::memcmp(data_ + at, period.data(), length) == 0) continue;
      const auto* bytes = reinterpret_cast<const uint8_t*>(data_ + at);
      return at + static_cast<size_t>(std::mismatch(bytes, bytes + length, period.begin()).first -
                                      bytes);
    }
    return kBytes;
  }

 private:
  static constexpr size_t kMapped = (kBytes / kPeriod + 1) * kPeriod;
  std::byte* data_ = nullptr;
};

class LongMessageTest : public testing::TestWithParam<std::vector<int>> {
 private:
  Watchdog watchdog_{110};
};

TEST_P(LongMessageTest, ReachesTheOtherRank) {
  const Period sent = periodOf(0);
  runRanks(GetParam(), [&](RankContext& rank) {
    const bool isRoot = rank.rank == 0;
    Memory data(isRoot ? sent : Period(kPeriod),
                isRoot ? Memory::Kind::Repeated : Memory::Kind::Whole);
    rank.run(broadcast(data.bytes(), 0));
    EXPECT_EQ(data.firstDifference(sent), kBytes) << "rank " << rank.rank;
  });
}

TEST_P(LongMessageTest, IsReduced) {
  const Period first = periodOf(0), second = periodOf(1);
  Period sum(kPeriod);
  std::transform(first.begin(), first.end(), second.begin(), sum.begin(), std::plus<>());
  runRanks(GetParam(), [&](RankContext& rank) {
    const bool isRoot = rank.rank == 0;
    Memory data(isRoot ? first : second, isRoot ? Memory::Kind::Whole : Memory::Kind::Repeated);
    rank.run(reduce(data.bytes(), 0, isRoot, DataType::uint8));
    EXPECT_EQ(data.firstDifference(isRoot ? sum : second), kBytes) << "rank " << rank.rank;
  });
}

INSTANTIATE_TEST_SUITE_P(OneNode, LongMessageTest, testing::Values(std::vector{2}));
INSTANTIATE_TEST_SUITE_P(TwoNodes, LongMessageTest, testing::Values(std::vector{1, 1}));

}  // namespace
}  // namespace smddp::test
