// Tags of smddp's own messages: negative, so that they never meet the user's.
#pragma once

#include <cstdint>

namespace smddp::process_group {

inline constexpr int32_t kTagOfBarrier = -1;  // monitored barrier: a rank has come
inline constexpr int32_t kTagOfRelease = -2;  // and may go

// Calls made of messages may be in flight together. They are told apart by their sequence number, which is the
// same on all ranks. (Splitting groups has tags between, see engine/split.cc.)
inline int32_t tagOfCall(uint64_t sequence) {
  constexpr uint64_t kCalls = uint64_t{1} << 30;
  return static_cast<int32_t>(-16 - static_cast<int64_t>(sequence % kCalls));
}

}  // namespace smddp::process_group
