// Why a group is broken, and from which operation on: that one and all later ones end with the cause.
#pragma once

#include <cstdint>

#include "common/error.h"
#include "common/types.h"

namespace smddp::engine::calls {

struct Break {
  uint64_t firstBroken;  // the sequence number of the first operation that ends with the cause
  Error cause;
  // If the group broke because a rank was lost: that rank, and the one that noticed it; else -1. `cause` then says only
  // how it was lost. Each rank words the error for itself (Sentinel::inWords), because the lost rank may be alive and
  // receive this.
  Rank lost = -1;
  Rank noticedBy = -1;
  bool isHostSilent = false;  // its host does not answer; known on the node of `noticedBy` only

  bool concerns(uint64_t sequence) const { return sequence >= firstBroken; }
};

// An error kind that another process has written as a number. The number may be invalid.
inline ErrorKind errorKindOf(uint32_t number) {
  return number <= static_cast<uint32_t>(ErrorKind::Internal) ? static_cast<ErrorKind>(number)
                                                              : ErrorKind::Internal;
}

}  // namespace smddp::engine::calls
