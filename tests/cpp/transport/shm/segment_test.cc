#include "transport/shm/segment.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <vector>

#include "common/error.h"
#include "transport/shm/child.h"

namespace {

// How much of a file fallocate() backs before a signal undoes it.
off_t mostBetweenSignals = std::numeric_limits<off_t>::max();

}  // namespace

// Instead of the C library's.
extern "C" int fallocate(int fd, int mode, off_t offset, off_t length) {
  if (mode == 0 && length > mostBetweenSignals) {
    errno = EINTR;
    return -1;
  }
  return static_cast<int>(syscall(SYS_fallocate, fd, mode, offset, length));
}

namespace smddp::transport::shm {
namespace {

using testing::Child;

template <typename Function>
std::pair<ErrorKind, std::string> errorOf(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
  return {ErrorKind::Internal, "no error"};
}

// The bytes of memory that back a segment of this process.
uint64_t backedBytes(const Segment& segment) {
  struct stat status {};
  EXPECT_EQ(fstat(segment.address().fd, &status), 0);
  return static_cast<uint64_t>(status.st_blocks) * 512;
}

TEST(Segment, IsZeroAlignedAndSparse) {
  const auto segment = Segment::create(size_t{8} << 30, "test");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(segment->data()) % Segment::kPage, 0u);
  EXPECT_EQ(segment->size(), size_t{8} << 30);
  EXPECT_EQ(segment->data()[0], std::byte{0});
  EXPECT_EQ(segment->data()[segment->size() - 1], std::byte{0});
  EXPECT_LT(backedBytes(*segment), 1u << 20);
}

TEST(Segment, CommitEndsAlthoughSignalsComeFast) {
  const auto segment = Segment::create(64 << 20, "test");
  const uint64_t before = backedBytes(*segment);
  mostBetweenSignals = 100'000;
  segment->commit(0, 40 << 20);
  mostBetweenSignals = std::numeric_limits<off_t>::max();
  EXPECT_GE(backedBytes(*segment), before + (40 << 20));
}

TEST(Segment, CommitBacksAndDiscardGivesBack) {
  const auto segment = Segment::create(64 << 20, "test");
  const uint64_t before = backedBytes(*segment);
  segment->commit(1 << 20, 40 << 20);
  EXPECT_GE(backedBytes(*segment), before + (40 << 20));
  std::memset(segment->data() + (1 << 20), 0xab, 40 << 20);
  segment->discard(1 << 20, 40 << 20);
  EXPECT_EQ(backedBytes(*segment), before);
  for (size_t i = 1 << 20; i < 41 << 20; i += 1 << 19) ASSERT_EQ(segment->data()[i], std::byte{0});
}

TEST(Segment, DiscardLeavesPartialPagesAlone) {
  const auto segment = Segment::create(4 * Segment::kPage, "test");
  std::memset(segment->data(), 1, segment->size());
  segment->discard(100, 3 * Segment::kPage);
  EXPECT_EQ(segment->data()[Segment::kPage - 1], std::byte{1});
  EXPECT_EQ(segment->data()[Segment::kPage], std::byte{0});
  EXPECT_EQ(segment->data()[3 * Segment::kPage - 1], std::byte{0});
  EXPECT_EQ(segment->data()[3 * Segment::kPage], std::byte{1});
}

TEST(Segment, OwnSegmentIsTheSameMapping) {
  const auto segment = Segment::create(4096, "test");
  EXPECT_EQ(Segment::attach(segment->address()), segment);
}

TEST(Segment, MateSeesTheSameBytes) {
  Child child([](const Child::Line& line) {
    const auto mine = Segment::create(1 << 20, "test");
    mine->data()[12345] = std::byte{42};
    line.send(mine->address());
    line.receive<char>();
    return mine->data()[54321] == std::byte{43} ? 0 : 1;
  });
  const auto theirs = Segment::attach(child.receive<SegmentAddress>());
  EXPECT_EQ(Segment::attach(theirs->address()), theirs) << "mapped twice";
  EXPECT_EQ(theirs->data()[12345], std::byte{42});
  theirs->data()[54321] = std::byte{43};
  child.send('x');
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(theirs->data()[12345], std::byte{42}) << "gone with its owner";
}

TEST(Segment, CannotBeResized) {
  const auto segment = Segment::create(1 << 20, "test");
  EXPECT_NE(ftruncate(segment->address().fd, 4096), 0);
  EXPECT_NE(ftruncate(segment->address().fd, 16 << 20), 0);
}

TEST(Segment, RefusesWhatWasNotPublished) {
  Child child([](const Child::Line& line) {
    const auto mine = Segment::create(1 << 20, "test");
    line.send(mine->address());
    line.receive<char>();
    return 0;
  });
  const auto published = child.receive<SegmentAddress>();
  const auto kindFor = [&](auto change) {
    SegmentAddress address = published;
    change(address);
    return errorOf([&] { Segment::attach(address); });
  };
  using Address = SegmentAddress;
  const std::pair<ErrorKind, std::string> answers[] = {
      kindFor([](Address& a) { a.nonce[3] ^= std::byte{1}; }),
      kindFor([](Address& a) { a.bytes *= 2; }),
      kindFor([](Address& a) { a.bytes = 0; }),
      kindFor([](Address& a) { a.bytes = ~uint64_t{0}; }),
      kindFor([](Address& a) { a.bytes = ~uint64_t{4095}; }),
      kindFor([](Address& a) { a.fd = 0; }),
      kindFor([](Address& a) { a.fd = 9999; }),
      kindFor([](Address& a) { a.pid = 1 << 30; }),
  };
  for (const auto& [kind, text] : answers) EXPECT_EQ(kind, ErrorKind::Transport) << text;
  EXPECT_NE(answers[7].second.find("SMDDP_NODE_ID"), std::string::npos) << "no advice";
  EXPECT_NO_THROW(Segment::attach(published));
}

TEST(Segment, RefusesAnUnsealedFileOfTheRightSize) {
  FILE* file = tmpfile();
  ASSERT_NE(file, nullptr);
  ASSERT_EQ(ftruncate(fileno(file), 2 * Segment::kPage), 0);
  const SegmentAddress address{getpid(), fileno(file), Segment::kPage, {}};
  EXPECT_EQ(errorOf([&] { Segment::attach(address); }).first, ErrorKind::Transport);
  fclose(file);
}

TEST(Segment, SaysWhatIsMissing) {
#if defined(SMDDP_SANITIZE_THREAD)
  constexpr size_t kMoreThanThereIs = size_t{1} << 40;  // TSan leaves little address space
#else
  constexpr size_t kMoreThanThereIs = size_t{1} << 45;
#endif
  const auto tooMuch = errorOf([] {
    const auto segment = Segment::create(kMoreThanThereIs, "test");
    segment->commit(0, segment->size());
  });
  EXPECT_EQ(tooMuch.first, ErrorKind::Resource) << tooMuch.second;
  EXPECT_NE(tooMuch.second.find(std::to_string(kMoreThanThereIs)), std::string::npos)
      << tooMuch.second;

  Child child([](const Child::Line&) {
    const rlimit descriptors{3, 3};
    setrlimit(RLIMIT_NOFILE, &descriptors);
    const auto [kind, text] = errorOf([] { Segment::create(4096, "test"); });
    return kind == ErrorKind::Resource && text.find("ulimit -n") != std::string::npos ? 0 : 1;
  });
  EXPECT_EQ(child.wait(), 0);
}

TEST(Segment, OnlyTheOwnerCommitsAndDiscards) {
  const auto segment = Segment::create(1 << 20, "test");
  segment->data()[0] = std::byte{7};
  Child child([&](const Child::Line&) {
    const auto discard = errorOf([&] { segment->discard(0, segment->size()); });
    const auto commit = errorOf([&] { segment->commit(0, segment->size()); });
    return discard.first == ErrorKind::Internal && commit.first == ErrorKind::Internal ? 0 : 1;
  });
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(segment->data()[0], std::byte{7});
}

TEST(Segment, LeavesNothingBehind) {
  // Other programs have files in /dev/shm, too, and make new ones at any time.
  constexpr const char* kName = "smddp-segment-test";
  Child child([](const Child::Line& line) {
    std::vector<std::shared_ptr<Segment>> mine;
    for (int i = 0; i < 1000; ++i) {
      mine.push_back(Segment::create(1 << 20, kName));
      if (i >= 2) mine[i - 2].reset();
      line.send(mine.back()->address());
      line.receive<char>();
    }
    pause();
    return 0;
  });
  const size_t descriptors = testing::openDescriptors();
  for (int i = 0; i < 1000; ++i) {
    const auto own = Segment::create(1 << 20, kName);
    ASSERT_EQ(Segment::attach(own->address()), own);
    const auto theirs = Segment::attach(child.receive<SegmentAddress>());
    ASSERT_EQ(theirs->data()[0], std::byte{0});
    child.send('x');
  }
  EXPECT_EQ(testing::openDescriptors(), descriptors);
  EXPECT_LT(testing::countFiles(fmt::format("/proc/{}/fd", child.pid()).c_str()), 40u);
  child.kill(SIGKILL);
  EXPECT_EQ(child.wait(), -SIGKILL);
  EXPECT_EQ(testing::countFiles("/dev/shm", kName), 0u);
}

}  // namespace
}  // namespace smddp::transport::shm
