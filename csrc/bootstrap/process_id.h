// The id of a process: 16 random bytes. No two processes on any machines have the same.
#pragma once

#include <array>
#include <cstddef>
#include <string>

namespace smddp::bootstrap {

using ProcessId = std::array<std::byte, 16>;

// Throws Resource if the kernel has no random bytes. A forked child must draw its own id.
ProcessId randomProcessId();
// 32 hexadecimal digits.
std::string toString(const ProcessId& id);

}  // namespace smddp::bootstrap
