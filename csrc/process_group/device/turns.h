// A call that the device and the hosts of all ranks carry out in turns, as ProcessGroup drives it.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "common/error.h"

namespace smddp::process_group::device {

// Threads: one at a time; giveUp() from any, after which the others may still be called. Errors are exceptions; whoever
// gets one calls giveUp().
class DeviceTurns {
 public:
  virtual ~DeviceTurns() = default;
  // Goes as far as it can. True when the last turn has begun; its end comes to what atEnd() was given.
  virtual bool advance() = 0;
  // The same on the thread of a caller that waits for the call: returns when all is done.
  virtual void advanceToEnd() = 0;
  // Before the first advance(): what to do when all is done, or has failed, on a thread that may run callbacks.
  virtual void atEnd(std::function<void(const std::optional<Error>&)> action) = 0;
  // The call has failed on this rank: the group with it, and what other ranks may still touch is kept.
  virtual void giveUp(const Error& error) noexcept = 0;
};

// What a device or other ranks may go on reading or writing after an error, tensors, workspaces and what was opened of
// others': never freed, closed, or given to anybody else.
void keepForGood(std::shared_ptr<void> memory);

}  // namespace smddp::process_group::device
