#include "engine/observe/status_board.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/shm/process_page.h"

namespace smddp::engine::observe {
namespace {

// Numbers and text at the places that status_board.h draws.
struct Head {
  char magic[8];
  int32_t pid;
  uint32_t slots;
  uint64_t startTime;
};
struct Shown {
  uint64_t version;
  uint64_t group;
  uint64_t calls;
  int64_t writtenAt;
  uint64_t length;
  char text[StatusBoard::kSlotBytes - 40];
  std::string words() const { return std::string(text, std::min(length, sizeof text)); }
};

// Reads a board of this process as `smddp status` does, which knows its name only.
class Reader {
 public:
  Reader() {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code isClosed;
      const auto target = std::filesystem::read_symlink(entry.path(), isClosed).string();
      if (target.find("smddp-status") == std::string::npos) continue;
      EXPECT_EQ(descriptor_, -1) << "there is another board";
      descriptor_ = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    }
    EXPECT_NE(descriptor_, -1);
  }
  ~Reader() { ::close(descriptor_); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  Head head() const { return read<Head>(0); }
  Shown slot(size_t number) const { return read<Shown>(number + 1); }

 private:
  template <typename Value>
  Value read(size_t place) const {
    Value value{};
    const auto begin = static_cast<off_t>(kFirst + place * StatusBoard::kSlotBytes);
    EXPECT_EQ(::pread(descriptor_, &value, sizeof value, begin), ssize_t{sizeof value});
    return value;
  }

  static constexpr size_t kFirst = 4096;  // after a page of the segment
  int descriptor_ = -1;
};

void expectShown(const Shown& shown, uint64_t group, const std::string& text, Nanoseconds at) {
  EXPECT_GT(shown.version, 0u) << "the slot is free";
  EXPECT_EQ(shown.version % 2, 0u) << "the slot is being written";
  EXPECT_EQ(shown.group, group);
  EXPECT_EQ(shown.words(), text);
  EXPECT_EQ(shown.writtenAt, at);
}

TEST(StatusBoard, SaysWhoseItIs) {
  const StatusBoard board;
  const Head head = Reader().head();
  EXPECT_EQ(std::string(head.magic, sizeof head.magic), "smddpst1");
  EXPECT_EQ(head.pid, getpid());
  EXPECT_EQ(head.slots, StatusBoard::kSlots);
  EXPECT_EQ(head.startTime, transport::shm::startTimeOf(getpid()));
}

TEST(StatusBoard, HasASlotForEachGroupUntilThereIsNoneLeft) {
  StatusBoard board;
  const Reader reader;
  std::vector<StatusBoard::Slot> slots;
  for (size_t i = 0; i < StatusBoard::kSlots + 2; ++i) {
    slots.push_back(board.claim());
    slots.back().write(i, "text " + std::to_string(i), 1);  // also without a slot
    slots.back().setCalls(2 * i);
  }
  for (size_t i = 0; i < StatusBoard::kSlots; ++i) {
    expectShown(reader.slot(i), i, "text " + std::to_string(i), 1);
    EXPECT_EQ(reader.slot(i).calls, 2 * i);
  }
  slots[3].end();
  slots[3].write(3, "not shown", 2);
  slots[3].setCalls(99);
  EXPECT_EQ(reader.slot(3).version, 0u);
  EXPECT_NE(reader.slot(3).words(), "not shown");
  slots.push_back(board.claim());  // takes that slot
  EXPECT_EQ(reader.slot(3).words(), "");
  EXPECT_EQ(reader.slot(3).calls, 0u);
  slots[3].end();  // does not give it back again
  StatusBoard::Slot moved = std::move(slots.back());
  moved.write(7, std::string(2 * StatusBoard::kSlotBytes, 'x'), 3);
  expectShown(reader.slot(3), 7, std::string(sizeof Shown::text, 'x'), 3);  // cut
  const uint64_t before = reader.slot(3).version;
  moved.write(8, "shorter", 4);
  expectShown(reader.slot(3), 8, "shorter", 4);
  EXPECT_GT(reader.slot(3).version, before) << "a reader would not see that it has changed";
  slots.clear();
  for (size_t i = 0; i < StatusBoard::kSlots; ++i) {
    EXPECT_EQ(reader.slot(i).version == 0, i != 3) << i;
  }
}

TEST(StatusBoard, SlotsMayOutliveIt) {
  auto board = std::make_unique<StatusBoard>();
  const Reader reader;
  StatusBoard::Slot slot = board->claim();
  board.reset();
  slot.write(1, "text", 1);
  expectShown(reader.slot(0), 1, "text", 1);
}

TEST(StatusBoard, FieldsHaveNoSeparators) {
  EXPECT_EQ(StatusBoard::field("a\tb\nc\x01"), "a b c?");
}

}  // namespace
}  // namespace smddp::engine::observe
