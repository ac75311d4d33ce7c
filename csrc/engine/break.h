// Why a group is broken, and from which operation on: that one and all behind it end with the cause.
#pragma once

#include <cstdint>

#include "common/error.h"
#include "common/types.h"

namespace smddp::engine {

struct Break {
  uint64_t from;  // sequence number
  Error cause;
  // If the cause is that a rank was lost: which, who noticed it, and `cause` says only how. Each rank puts that into
  // words of its own (Sentinel::inWords): the rank that was lost may be alive, and receive this.
  Rank lost = -1;
  Rank noticedBy = -1;
  bool isHostSilent = false;  // why it was lost; known on the node of `noticedBy` only

  bool concerns(uint64_t sequence) const { return sequence >= from; }
};

// The kind that another process has written as a number, which may be any.
inline ErrorKind errorKindOf(uint32_t number) {
  return number <= static_cast<uint32_t>(ErrorKind::Internal) ? static_cast<ErrorKind>(number)
                                                              : ErrorKind::Internal;
}

}  // namespace smddp::engine
