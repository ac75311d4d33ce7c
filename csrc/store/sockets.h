// Functions for sockets that both ends of the store use.
#pragma once

#include <netdb.h>

#include <cstdint>
#include <memory>
#include <string>

#include "common/clock.h"
#include "common/file_descriptor.h"

namespace smddp::store {

inline constexpr Nanoseconds kMillisecond = 1'000'000;
inline constexpr Nanoseconds kSlice = 50 * kMillisecond;  // between looks at signals

struct FreeAddresses {
  void operator()(addrinfo* addresses) const {
    if (addresses) ::freeaddrinfo(addresses);
  }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// Asks the name service. An empty host: every interface of this machine. While the name service does not answer, and
// for up to 10 s while it knows no such host, waits, at most for the timeout: ranks may be started before a cluster
// knows the name of rank 0. Throws Usage if there is no such host.
Addresses resolve(const std::string& host, uint16_t port, Nanoseconds timeout);

// Looks at signals.
void pause(Nanoseconds duration);

// Small frames leave at once, and a host that has vanished is noticed.
void configure(const FileDescriptor& socket);

}  // namespace smddp::store
