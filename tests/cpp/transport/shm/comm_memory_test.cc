#include "transport/shm/comm_memory.h"

#include <cstring>
#include <random>
#include <thread>

#include "common/error.h"
#include "transport/shm/child.h"

namespace smddp::transport::shm {
namespace {

using testing::Child;

constexpr size_t kMiB = size_t{1} << 20;

std::shared_ptr<Slab> smallSlab() { return Slab::create(Slab::kLeastReserve); }

ErrorKind kindOf(const std::function<void()>& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.kind();
  }
  ADD_FAILURE() << "no error";
  return ErrorKind::Internal;
}

TEST(CommMemory, RandomUseNeverMixesBlocks) {
  for (uint32_t seed = 0; seed < 5; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    CommMemory memory(smallSlab(), 8 * kMiB);
    struct Block {
      unsigned char* data;
      size_t bytes;
      unsigned char fill;
    };
    std::vector<Block> blocks;
    for (int i = 0; i < 1500; ++i) {
      if (blocks.size() < 40 && random() % 5 < 3) {
        const size_t bytes = random() % 20 == 0 ? random() % (4 * kMiB) : random() % 70'000;
        auto* data = static_cast<unsigned char*>(memory.allocate(bytes));
        ASSERT_EQ(reinterpret_cast<uintptr_t>(data) % CommMemory::kAlignment, 0u);
        const auto fill = static_cast<unsigned char>(random());
        std::memset(data, fill, bytes);
        blocks.push_back({data, bytes, fill});
      } else if (!blocks.empty()) {
        const auto it = blocks.begin() + random() % blocks.size();
        // The first byte is right, and each byte equals the one before it.
        if (it->bytes > 0) {
          ASSERT_EQ(it->data[0], it->fill);
          ASSERT_EQ(std::memcmp(it->data, it->data + 1, it->bytes - 1), 0);
        }
        memory.free(it->data);
        blocks.erase(it);
      }
    }
    for (const Block& block : blocks) memory.free(block.data);
    EXPECT_LE(memory.heldBytes(), 8 * kMiB + CommMemory::kArenaBytes);
  }
}

TEST(CommMemory, FreedBlocksAreReusedUpToTheLimit) {
  CommMemory memory(smallSlab(), 16 * kMiB);
  void* first = memory.allocate(8 * kMiB);
  memory.free(first);
  EXPECT_EQ(memory.allocate(7 * kMiB), first) << "a little less fits as well";
  memory.free(first);
  void* small = memory.allocate(2 * kMiB);
  EXPECT_NE(small, first) << "a block four times as large is not spent on it";
  EXPECT_EQ(memory.heldBytes(), 10 * kMiB);
  void* more = memory.allocate(12 * kMiB);
  memory.free(more);
  EXPECT_EQ(memory.heldBytes(), 14 * kMiB) << "the oldest free block makes room";
  memory.free(small);
  EXPECT_EQ(memory.heldBytes(), 14 * kMiB);
}

TEST(CommMemory, CacheOfNothingReturnsAllMemory) {
  CommMemory memory(smallSlab(), 0);
  const size_t descriptors = testing::openDescriptors();
  for (int i = 0; i < 100; ++i) {
    void* large = memory.allocate(kMiB);
    void* small = memory.allocate(100);
    EXPECT_EQ(testing::openDescriptors(), descriptors + 2);
    memory.free(large);
    memory.free(small);
    ASSERT_EQ(memory.heldBytes(), 0u);
  }
  EXPECT_EQ(testing::openDescriptors(), descriptors);
}

TEST(CommMemory, LocatesExactlyWhatLiesInOneBlock) {
  CommMemory memory(smallSlab(), 64 * kMiB);
  auto* large = static_cast<std::byte*>(memory.allocate(3 * kMiB));
  auto* small = static_cast<std::byte*>(memory.allocate(100));  // takes 128
  auto* next = static_cast<std::byte*>(memory.allocate(64));
  ASSERT_EQ(next, small + 128);
  const auto inside = memory.locate(large + 17, 3 * kMiB - 17);
  ASSERT_TRUE(inside);
  EXPECT_EQ(inside->offset, 17u);
  EXPECT_EQ(inside->segment.pid, getpid());
  ASSERT_TRUE(memory.locate(small, 128));
  EXPECT_EQ(memory.locate(next, 64)->offset, memory.locate(small, 1)->offset + 128);
  EXPECT_TRUE(memory.locate(small, 0));
  EXPECT_FALSE(memory.locate(small, 129)) << "two blocks";
  EXPECT_FALSE(memory.locate(large + 4 * kMiB - 1, 2)) << "beyond the end";
  EXPECT_FALSE(memory.locate(large, ~size_t{0}));
  EXPECT_FALSE(memory.locate(large - 1, 1));
  EXPECT_FALSE(memory.locate(nullptr, 1));
  EXPECT_FALSE(memory.locate(&memory, 1));
  memory.free(large);
  EXPECT_FALSE(memory.locate(large, 1)) << "a free block";
  memory.free(small);
  EXPECT_FALSE(memory.locate(small, 1));
  EXPECT_TRUE(memory.locate(next, 64));
}

TEST(CommMemory, RefusesForeignAndDoubleFrees) {
  CommMemory memory(smallSlab(), 64 * kMiB);
  int local = 0;
  void* large = memory.allocate(kMiB);
  auto* small = static_cast<std::byte*>(memory.allocate(64));
  EXPECT_EQ(kindOf([&] { memory.free(&local); }), ErrorKind::Internal);
  EXPECT_EQ(kindOf([&] { memory.free(small + 1); }), ErrorKind::Internal);
  memory.free(large);
  EXPECT_EQ(kindOf([&] { memory.free(large); }), ErrorKind::Internal);
  memory.free(small);
  EXPECT_EQ(kindOf([&] { memory.free(small); }), ErrorKind::Internal);
}

TEST(CommMemory, ThreadsMayAllocateAndFreeTogether) {
  CommMemory memory(smallSlab(), 4 * kMiB);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 300; ++i) {
        const size_t bytes = random() % 10 == 0 ? kMiB + random() % kMiB : 1 + random() % 5000;
        auto* data = static_cast<unsigned char*>(memory.allocate(bytes));
        std::memset(data, t, bytes);
        if (!memory.locate(data, bytes)) ++wrong;
        for (const size_t at : {size_t{0}, bytes / 2, bytes - 1}) wrong += data[at] != t;
        memory.free(data);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(CommMemory, ForkedChildLeavesItAlone) {
  CommMemory memory(smallSlab(), 0);
  auto* block = static_cast<char*>(memory.allocate(kMiB));
  std::memset(block, 5, kMiB);
  Child child([&](const Child::Line&) {
    memory.free(block);
    return kindOf([&] { memory.allocate(10); }) == ErrorKind::Resource ? 0 : 1;
  });
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(block[kMiB - 1], 5) << "the child gave its parent's memory back";
  memory.free(block);
}

// The child process: it owns blocks that the parent maps.
int serve(const Child::Line& line) {
  const auto slab = Slab::create();
  CommMemory memory(slab, 0);
  line.send(slab->address());
  std::vector<void*> blocks;
  for (;;) {
    const auto bytes = line.receive<int64_t>();  // 0: free the oldest; negative: end
    if (bytes < 0) return 0;
    if (bytes == 0) {
      memory.free(blocks.front());
      blocks.erase(blocks.begin());
      line.send('f');
      continue;
    }
    blocks.push_back(memory.allocate(static_cast<size_t>(bytes)));
    std::memset(blocks.back(), static_cast<int>(blocks.size()), static_cast<size_t>(bytes));
    line.send(*memory.locate(blocks.back(), static_cast<size_t>(bytes)));
  }
}

class MateMemoryTest : public ::testing::Test {
 protected:
  Location ask(int64_t bytes) {
    child_.send(bytes);
    return child_.receive<Location>();
  }
  void freeOldest() {
    child_.send(int64_t{0});
    EXPECT_EQ(child_.receive<char>(), 'f');
  }

  Child child_{serve};
  MateMemory mate_{Mate::attach(child_.receive<SegmentAddress>())};
};

TEST_F(MateMemoryTest, ResolvesLargeAndSmallBlocks) {
  const Location large = ask(3 * kMiB);
  const Location small = ask(1000);
  const Location next = ask(1000);
  const std::byte* a = mate_.resolve(large, 3 * kMiB);
  EXPECT_EQ(a[0], std::byte{1});
  EXPECT_EQ(a[3 * kMiB - 1], std::byte{1});
  EXPECT_EQ(mate_.resolve(small, 1000)[999], std::byte{2});
  EXPECT_EQ(mate_.resolve(next, 1000)[0], std::byte{3});
  EXPECT_EQ(mate_.mappings(), 2u) << "small blocks share a mapping";
  EXPECT_EQ(mate_.resolve(large, 1), a) << "mapped again";
}

TEST_F(MateMemoryTest, RefusesWhatTheOwnerDoesNotHave) {
  const Location location = ask(3 * kMiB);
  const auto refused = [&](auto change, size_t bytes = 1) {
    Location changed = location;
    change(changed);
    EXPECT_EQ(kindOf([&] { mate_.resolve(changed, bytes); }), ErrorKind::Transport);
  };
  const auto allRefused = [&] {
    refused([](Location& l) { l.offset = 4 * kMiB; });
    refused([](Location& l) { l.offset = ~uint64_t{0}; });
    refused([](Location&) {}, 4 * kMiB + 1);
    refused([](Location&) {}, ~size_t{0});
    refused([](Location& l) { l.index += 1; });
    refused([](Location& l) { l.index = ~0u; });
    refused([](Location& l) { l.segment.pid = getpid(); });
    refused([](Location& l) { l.segment.nonce[5] ^= std::byte{4}; });
    refused([](Location& l) { l.segment.nonce[15] ^= std::byte{4}; });
    refused([](Location& l) { l.segment.bytes *= 2; });
  };
  allRefused();
  EXPECT_NO_THROW(mate_.resolve(location, 3 * kMiB));
  allRefused();  // also after the genuine one is mapped
}

TEST_F(MateMemoryTest, DropsWhatTheOwnerFreed) {
  const Location first = ask(3 * kMiB);
  mate_.resolve(first, 1);
  freeOldest();
  EXPECT_EQ(kindOf([&] { mate_.resolve(first, 1); }), ErrorKind::Transport);
  for (int i = 0; i < 20; ++i) {
    mate_.resolve(ask(3 * kMiB), 1);
    freeOldest();
  }
  EXPECT_EQ(mate_.mappings(), 1u);
}

TEST_F(MateMemoryTest, OutlivesItsOwner) {
  const std::byte* data = mate_.resolve(ask(kMiB), kMiB);
  child_.kill(SIGKILL);
  child_.wait();
  EXPECT_EQ(data[kMiB - 1], std::byte{1});
}

TEST(MateMemory, OfThisProcessIsTheSameMemory) {
  const auto slab = smallSlab();
  CommMemory memory(slab, 64 * kMiB);
  void* block = memory.allocate(kMiB);
  MateMemory mate(Mate::attach(slab->address()));
  EXPECT_EQ(mate.resolve(*memory.locate(block, kMiB), kMiB), block);
}

}  // namespace
}  // namespace smddp::transport::shm
