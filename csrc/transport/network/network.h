// Opens the transport between nodes, as SMDDP_PROVIDER (Settings::provider) says.
//
// "sockets" means the kernel's TCP (tcp/tcp_transport.h). Any other name is a provider of libfabric (fabric/fabric.h).
// Unset: libfabric if the machine has a card that it drives (efa, cxi, verbs), else TCP. For TCP, libfabric is not
// loaded.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "common/config.h"
#include "transport/transport.h"

namespace smddp::transport::network {

// `host`: the numeric address of this machine at which peers reach it. Throws Usage if the named provider is missing,
// or if nothing can listen at the address.
std::unique_ptr<Transport> open(const Settings& settings, const std::string& host);

// True if the kernel drives a card that can bypass its own network stack. `classes` is sysfs' list of kinds of devices.
bool hasCard(const std::filesystem::path& classes = "/sys/class");

}  // namespace smddp::transport::network
