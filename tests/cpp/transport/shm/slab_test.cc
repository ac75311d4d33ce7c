#include "transport/shm/slab.h"

#include <sys/resource.h>

#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "common/error.h"
#include "transport/shm/child.h"

namespace smddp::transport::shm {
namespace {

using testing::Child;

TEST(RegionAllocator, NeverOverlapsAndJoinsNeighbours) {
  constexpr uint64_t kEnd = 1 << 16;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    RegionAllocator regions(64, kEnd);
    std::map<uint64_t, uint64_t> used;  // offset -> end: the oracle
    for (int i = 0; i < 3000; ++i) {
      if (used.empty() || random() % 2 == 0) {
        const uint64_t bytes = 1 + random() % 3000;
        const uint64_t align = uint64_t{1} << random() % 10;
        const auto offset = regions.allocate(bytes, align);
        if (!offset) continue;
        ASSERT_EQ(*offset % align, 0u);
        ASSERT_GE(*offset, 64u);
        ASSERT_LE(*offset + bytes, kEnd);
        const auto next = used.lower_bound(*offset);
        ASSERT_TRUE(next == used.end() || *offset + bytes <= next->first);
        ASSERT_TRUE(next == used.begin() || std::prev(next)->second <= *offset);
        used[*offset] = *offset + bytes;
      } else {
        const auto it = std::next(used.begin(), random() % used.size());
        regions.free(it->first, it->second - it->first);
        used.erase(it);
      }
    }
    for (const auto& [offset, end] : used) regions.free(offset, end - offset);
    EXPECT_EQ(regions.used(), 0u);
    EXPECT_EQ(regions.allocate(kEnd - 64, 64), 64u) << "holes stayed apart";
  }
}

TEST(RegionAllocator, NoticesDoubleFree) {
  RegionAllocator regions(0, 4096);
  const uint64_t a = *regions.allocate(64, 64);
  const uint64_t b = *regions.allocate(64, 64);
  regions.free(a, 64);
  EXPECT_THROW(regions.free(a, 64), Error);
  regions.free(b, 64);
  EXPECT_THROW(regions.free(a, 64), Error);
  EXPECT_THROW(regions.free(b, 64), Error);
}

TEST(Slab, HandsOutZeroedPagesAgainAndAgain) {
  const auto slab = Slab::create();
  const auto first = slab->allocate(10'000);
  EXPECT_EQ(first.size(), 10'000u);
  EXPECT_EQ(slab->offsetOf(first.data()) % Segment::kPage, 0u);
  EXPECT_GE(slab->offsetOf(first.data()), sizeof(ProcessPage));
  std::memset(first.data(), 0xff, first.size());
  slab->free(first);
  const auto second = slab->allocate(10'000);
  EXPECT_EQ(second.data(), first.data()) << "not reused";
  for (const std::byte b : second) ASSERT_EQ(b, std::byte{0});
  const auto third = slab->allocate(1, 1 << 20);
  EXPECT_EQ(slab->offsetOf(third.data()) % (1 << 20), 0u);
  slab->commit(third);
}

TEST(Slab, PagesThatAreKeptOutliveEverything) {
  const auto slab = Slab::create(Slab::kLeastReserve);
  constexpr size_t kPage = Segment::kPage;
  const auto memory = slab->allocate(8 * kPage);
  const auto pages = [&](size_t first, size_t count) {
    return memory.subspan(first * kPage, count * kPage);
  };
  const auto contents = [&] {
    std::string text;
    for (size_t i = 0; i < 8; ++i) text += memory[i * kPage] == std::byte{0} ? '.' : 'x';
    return text;
  };
  const auto discardAll = [&] {
    std::memset(memory.data(), 1, memory.size());
    slab->discard(memory);
    return contents();
  };
  EXPECT_EQ(discardAll(), "........");
  slab->keep(pages(6, 1));
  slab->keep(pages(2, 1));
  EXPECT_EQ(discardAll(), "..x...x.");
  EXPECT_TRUE(slab->keeps(memory) && slab->keeps(pages(1, 2)) && slab->keeps(pages(2, 1)));
  EXPECT_FALSE(slab->keeps(pages(0, 2)) || slab->keeps(pages(3, 3)) || slab->keeps(pages(7, 1)));
  slab->keep(pages(2, 2).first(kPage + 1));  // a part of a page keeps all of it
  EXPECT_EQ(discardAll(), "..xx..x.");
  slab->keep(pages(1, 6));  // around both
  EXPECT_EQ(discardAll(), ".xxxxxx.");
  slab->keep(pages(0, 1));  // next to them
  EXPECT_EQ(discardAll(), "xxxxxxx.");

  std::memset(memory.data(), 1, memory.size());
  slab->free(memory);
  EXPECT_EQ(contents(), "xxxxxxxx");
  const auto other = slab->allocate(8 * kPage);
  EXPECT_TRUE(other.data() + other.size() <= memory.data() ||
              memory.data() + memory.size() <= other.data());
}

TEST(Slab, SaysWhenItIsFull) {
  const auto slab = Slab::create(Slab::kLeastReserve);
  const auto most = slab->allocate(200 << 20);
  try {
    slab->allocate(100 << 20);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Resource);
    EXPECT_NE(std::string(error.what()).find("SMDDP_POOL_BYTES"), std::string::npos)
        << error.what();
  }
  slab->free(most);
  EXPECT_NO_THROW(slab->allocate(100 << 20));
}

TEST(Slab, RefusesForeignPointers) {
  const auto slab = Slab::create(Slab::kLeastReserve);
  int local = 0;
  EXPECT_THROW(slab->offsetOf(&local), Error);
}

#if !defined(SMDDP_SANITIZE_ADDRESS) && !defined(SMDDP_SANITIZE_THREAD)
TEST(Slab, TakesLessWhereAddressSpaceIsLimited) {
  Child child([](const Child::Line&) {
    const rlimit space{size_t{3} << 30, size_t{3} << 30};
    setrlimit(RLIMIT_AS, &space);
    const auto slab = Slab::create();
    slab->commit(slab->allocate(1 << 20));
    return slab->size() >= Slab::kLeastReserve && slab->size() < size_t{3} << 30 ? 0 : 1;
  });
  EXPECT_EQ(child.wait(), 0);
  Child poor([](const Child::Line&) {
    const rlimit space{size_t{200} << 20, size_t{200} << 20};
    setrlimit(RLIMIT_AS, &space);
    try {
      Slab::create();
    } catch (const Error& error) {
      return error.kind() == ErrorKind::Resource ? 0 : 2;
    }
    return 1;
  });
  EXPECT_EQ(poor.wait(), 0);
}
#endif

TEST(Mate, ReadsAndWritesTheSlabOfAnotherProcess) {
  Child child([](const Child::Line& line) {
    const auto slab = Slab::create();
    const auto memory = slab->allocate(100);
    memory[0] = std::byte{1};
    line.send(slab->address());
    line.send(slab->offsetOf(memory.data()));
    line.receive<char>();
    return memory[1] == std::byte{2} ? 0 : 1;
  });
  const auto mate = Mate::attach(child.receive<SegmentAddress>());
  const auto offset = child.receive<uint64_t>();
  EXPECT_EQ(mate->page().pid, child.pid());
  EXPECT_EQ(mate->data()[offset], std::byte{1});
  mate->data()[offset + 1] = std::byte{2};
  child.send('x');
  EXPECT_EQ(child.wait(), 0);
}

TEST(Mate, RefusesAnotherLayout) {
  const auto slab = Slab::create(Slab::kLeastReserve);
  slab->page().version += 1;
  try {
    Mate::attach(slab->address());
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Transport);
    EXPECT_NE(std::string(error.what()).find("same version"), std::string::npos) << error.what();
  }
  const auto plain = Segment::create(1 << 20, "test");
  EXPECT_THROW(Mate::attach(plain->address()), Error);
  const auto tiny = Segment::create(4096, "test");
  EXPECT_THROW(Mate::attach(tiny->address()), Error);
}

}  // namespace
}  // namespace smddp::transport::shm
