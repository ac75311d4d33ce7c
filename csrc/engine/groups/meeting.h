// The interface through which the ranks of a new group exchange information: through a store (store_meeting.h), or in
// messages of a group that all of them are in (split.h).
//
// Engine::createGroup() calls these functions on the thread that makes the group, which does not own the engine: first
// exchange(), then complete(), or tell() in place of either.
#pragma once

#include "bootstrap/introduction.h"
#include "common/error.h"
#include "engine/groups/group.h"

namespace smddp::engine::groups {

class Meeting {
 public:
  virtual ~Meeting() = default;
  // Gives the others what they must know of this rank, and returns that of all. Throws why there will be no group; then
  // the others know it, too, unless it is a Timeout: their own time is over then.
  virtual Members exchange(const bootstrap::Introduction& mine) = 0;
  // The group exists here. Returns when all ranks can work in it. Throws why they cannot.
  virtual void complete() = 0;
  // This rank cannot be in the group, because of an error that did not come from exchange(), or came from complete().
  // The others throw the error, instead of waiting for this rank. Returns the one that this rank has to throw: if
  // several ranks have an error, that may be another one's. Throws nothing.
  virtual Error tell(const Error& error) noexcept = 0;
};

}  // namespace smddp::engine::groups
