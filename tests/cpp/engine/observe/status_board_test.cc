#include "engine/observe/status_board.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace smddp::engine::observe {
namespace {

TEST(StatusBoard, HasASlotForEachGroupUntilThereIsNoneLeft) {
  StatusBoard board;
  std::vector<StatusBoard::Slot> slots;
  for (size_t i = 0; i < StatusBoard::kSlots + 2; ++i) {
    slots.push_back(board.claim());
    slots.back().write(i, "text", 1);  // also without a slot
    slots.back().setCalls(i);
  }
  slots[3].end();
  slots[3].write(3, "not shown", 2);
  slots.push_back(board.claim());  // takes that slot
  slots[3].end();                  // does not give it back again
  StatusBoard::Slot moved = std::move(slots.back());
  moved.write(7, std::string(2 * StatusBoard::kSlotBytes, 'x'), 3);  // is cut
}

TEST(StatusBoard, SlotsMayOutliveIt) {
  auto board = std::make_unique<StatusBoard>();
  StatusBoard::Slot slot = board->claim();
  board.reset();
  slot.write(1, "text", 1);
}

TEST(StatusBoard, FieldsHaveNoSeparators) {
  EXPECT_EQ(StatusBoard::field("a\tb\nc\x01"), "a b c?");
}

}  // namespace
}  // namespace smddp::engine::observe
