// Measures which wire format suits the network of a group: for groups that are made with the option "auto".
#pragma once

#include <array>

#include "engine/engine.h"

namespace smddp::engine {

// Seconds that an allreduce takes, by format.
using WireTimes = std::array<float, kNumWires>;

// The format that is worth what it loses: a shorter one if it takes at most three quarters of the time of the best
// format before. Example: fp32 12 ms, bf16 7 ms, int8 6 ms. It is bf16, because 7 <= 9, and then 6 > 5.25.
Wire worthwhile(const WireTimes& times);

// The group uses the format that is worth it on its slowest rank; `mine` are the times of this rank. All ranks of the
// group call it; it blocks. Returns the longest times. Throws what has ended the allreduce.
WireTimes useWorthwhile(Engine& engine, groups::Group& group, const WireTimes& mine,
                        Nanoseconds timeout);

// Measures the formats with allreduces, and makes the group use the one that is worth it (useWorthwhile). All ranks of
// the group call it; it blocks. Does nothing if the group has another option, or is on one node. Throws what has ended
// the allreduces.
void chooseWire(Engine& engine, const std::shared_ptr<groups::Group>& group, Nanoseconds timeout);

}  // namespace smddp::engine
