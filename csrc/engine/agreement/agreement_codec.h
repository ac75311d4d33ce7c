// The messages of the agreement as bytes. They come from other processes.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "engine/agreement/agreement.h"

namespace smddp::engine::agreement {

std::vector<std::byte> serialise(MemberId from, const Message& message);
// Returns the sender, too. Throws Transport if the bytes are no message.
std::pair<MemberId, Message> parseMessage(std::span<const std::byte> bytes);

}  // namespace smddp::engine::agreement
