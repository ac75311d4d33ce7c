// Shows the state of a process to `smddp status` (smddp/tools/status.py), which reads it without stopping anybody: in a
// segment with a slot for each group. Readers find it in /proc/<pid>/fd by its name, and map it for reading only.
//
//   byte  0         8     12       16         | 1024 · (1 + n): slot n
//         | magic   | pid | kSlots | startTime|
//
//   byte of a slot  0          8         16        24           32        40
//                   | version  | group   | calls   | writtenAt  | length  | text
//
// `version` is 0 while the slot is free, odd while it is being written. `text` has lines, whose fields are separated by
// tabs:
//   group  <name> <rank> <size> <rank in the job>
//   wait   <number of the call, or 0> <since when, or 0> <call> <what it waits for> <whose fault it is, or nothing>
//
// Times are nanoseconds of CLOCK_MONOTONIC. The lines about waits hold only if `writtenAt` is less than a second old.
//
// Threads: the one that owns the engine. Errors: none; without memory, or with more groups than slots, less is shown.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/clock.h"
#include "transport/shm/segment.h"

namespace smddp::engine::observe {

class StatusBoard {
  struct Page;

 public:
  static constexpr size_t kSlots = 63;
  static constexpr size_t kSlotBytes = 1024;

  // The slot of one group; empty if there was none left. Gives it back when it ends.
  class Slot {
   public:
    Slot() = default;
    ~Slot() { end(); }
    Slot(Slot&& other) noexcept = default;
    Slot& operator=(Slot&&) = delete;

    // Replaces the text; a longer one is cut.
    void write(uint64_t group, const std::string& text, Nanoseconds now);
    // The number of the last call.
    void setCalls(uint64_t calls);
    // Gives the slot back; from now on nothing is shown.
    void end();

   private:
    friend class StatusBoard;
    struct Content;
    Slot(std::shared_ptr<transport::shm::Segment> segment, Content* content)
        : segment_(std::move(segment)), content_(content) {}

    std::shared_ptr<transport::shm::Segment> segment_;  // null: there is no slot
    Content* content_ = nullptr;
  };

  StatusBoard();
  Slot claim();

  // A field of a line.
  static std::string field(const std::string& text);

 private:
  std::shared_ptr<transport::shm::Segment> segment_;
};

}  // namespace smddp::engine::observe
