// Random numbers, for ids.
#pragma once

#include <cstdint>

namespace smddp {

// A number from the system's source of randomness.
uint64_t randomNumber();

}  // namespace smddp
