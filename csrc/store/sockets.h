// What the store's two ends do with sockets alike.
#pragma once

#include <netdb.h>

#include <cstdint>
#include <memory>
#include <string>

#include "common/file_descriptor.h"

namespace smddp::store {

struct FreeAddresses {
  void operator()(addrinfo* addresses) const {
    if (addresses) ::freeaddrinfo(addresses);
  }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// Asks the name service. An empty host: every interface of this machine. Throws Usage if there is no such host.
Addresses resolve(const std::string& host, uint16_t port);

// Small frames leave at once, and a host that has vanished is noticed.
void configure(const FileDescriptor& socket);

}  // namespace smddp::store
