// Functions for sockets that both ends of the store use.
#pragma once

#include <cstdint>
#include <string>

#include "common/clock.h"
#include "common/file_descriptor.h"
#include "common/host_address.h"

namespace smddp::store {

inline constexpr Nanoseconds kMillisecond = 1'000'000;
inline constexpr Nanoseconds kSlice = 50 * kMillisecond;  // between looks at signals

// Asks the name service. While that does not answer, and for up to 10 s while it knows no such host, waits, at most for
// the timeout: ranks may be started before a cluster knows the name of rank 0. Throws Usage if there is no such host.
AddressList resolve(const std::string& host, uint16_t port, Nanoseconds timeout);

// Looks at signals.
void pause(Nanoseconds duration);

// Small frames leave at once, and a host that has vanished is noticed.
void configure(const FileDescriptor& socket);

}  // namespace smddp::store
