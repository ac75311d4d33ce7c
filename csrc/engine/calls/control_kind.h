// The kinds of the engine's control messages. Kinds below kFirstEngineKind belong to the channels.
#pragma once

#include "transport/wire.h"

namespace smddp::engine::calls {

inline constexpr uint8_t kAnnounce = transport::kFirstEngineKind;
inline constexpr uint8_t kAccept = transport::kFirstEngineKind + 1;
inline constexpr uint8_t kInquiry = transport::kFirstEngineKind + 2;
inline constexpr uint8_t kAnswer = transport::kFirstEngineKind + 3;
inline constexpr uint8_t kBuffered = transport::kFirstEngineKind + 4;
inline constexpr uint8_t kLeft = transport::kFirstEngineKind + 5;
inline constexpr uint8_t kTrouble = transport::kFirstEngineKind + 6;
inline constexpr uint8_t kNote = transport::kFirstEngineKind + 7;  // meeting_point.h

}  // namespace smddp::engine::calls
