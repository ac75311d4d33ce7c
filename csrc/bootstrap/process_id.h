// Who a process is: 16 random bytes, drawn once, equal to no other process's on any machine at any
// time.
#pragma once

#include <array>
#include <cstddef>
#include <string>

namespace smddp::bootstrap {

using ProcessId = std::array<std::byte, 16>;

// Throws Resource when the kernel has no random bytes. A forked child must draw its own.
ProcessId randomProcessId();
// 32 hexadecimal digits.
std::string toString(const ProcessId& id);

}  // namespace smddp::bootstrap
