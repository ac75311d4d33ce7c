// Numbers that tell things apart which nobody has numbered.
#pragma once

#include <cstdint>

namespace smddp {

// From the system's source of randomness.
uint64_t randomNumber();

}  // namespace smddp
