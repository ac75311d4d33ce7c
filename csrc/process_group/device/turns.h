// A call that is carried out on the device: the device and the hosts of all ranks work on it in turns. Calls drives it.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "common/error.h"

namespace smddp::process_group::device {

// Threads: one at a time; giveUp() from any, and the other functions may still be called after it. Errors are
// exceptions; the thread that catches one calls giveUp().
class DeviceTurns {
 public:
  virtual ~DeviceTurns() = default;
  // Goes on without waiting. True when the last turn has begun; when that ends, the action of atEnd() runs.
  virtual bool advance() = 0;
  // Carries out the whole call on the thread of a caller that waits for it.
  virtual void advanceToEnd() = 0;
  // Before the first advance(): the action for the end of the call, or for its error. It runs on a thread that may run
  // continuations.
  virtual void atEnd(std::function<void(const std::optional<Error>&)> action) = 0;
  // The call has failed on this rank. The group fails, too, and memory that other ranks may still use is kept.
  virtual void giveUp(const Error& error) noexcept = 0;
};

// Keeps memory, such as that of a call, until the process ends. After an error a device or other ranks may still read
// and write tensors, workspaces and opened memory, so these must not be freed, closed, or used again.
void keepForGood(std::shared_ptr<void> memory);

}  // namespace smddp::process_group::device
