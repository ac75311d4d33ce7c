// Opens the transport between nodes.
//
//   SMDDP_PROVIDER=sockets          TCP sockets of the kernel (tcp/tcp_transport.h)
//   SMDDP_PROVIDER=<any other>      that provider of libfabric (fabric/fabric.h)
//   unset                           libfabric if the machine has a card for which libfabric is faster (efa, cxi, verbs);
//                                   otherwise TCP sockets, and libfabric is not even loaded
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "transport/transport.h"

namespace smddp::transport::network {

// `host`: the numeric address of this machine at which peers reach it. Throws Usage if the named provider is missing, or
// if nothing can listen at the address.
std::unique_ptr<Transport> open(const std::string& host);

// True if the kernel drives a card that can bypass its own network stack. `classes` is sysfs' list of kinds of devices.
bool hasCard(const std::filesystem::path& classes = "/sys/class");

}  // namespace smddp::transport::network
