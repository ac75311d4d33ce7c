// Tags of smddp's own messages. They are negative, and the user's are not.
#pragma once

#include <cstdint>

namespace smddp::process_group {

inline constexpr int32_t kTagOfBarrier = -1;  // monitored barrier, to rank 0: this rank has come
inline constexpr int32_t kTagOfBarrierAnswer = -2;  // monitored barrier, from rank 0: all have come

// Several calls that are made of messages may be in flight at once. Their sequence numbers, which are the same on all
// ranks, tell them apart: call 1 has tag -17. (Tags -3 and -4 are for splitting groups, see engine/split.cc.)
inline int32_t tagOfCall(uint64_t sequence) {
  constexpr uint64_t kCalls = uint64_t{1} << 30;
  return static_cast<int32_t>(-16 - static_cast<int64_t>(sequence % kCalls));
}

}  // namespace smddp::process_group
