// Chooses the address of this machine to which peers on other nodes connect.
#pragma once

#include <filesystem>
#include <string>

#include "common/config.h"

namespace smddp::bootstrap {

// Returns a numeric IPv4 or IPv6 address of one interface, never the wildcard:
//   SMDDP_INTERFACE is set             that interface's address; throws Usage, with a list, if there is none. libfabric
//                                      also takes the name of a card there (its domain). If the card has no interface
//                                      of the kernel, the address is that without SMDDP_INTERFACE; if it has one,
//                                      throws Usage with its name
//   masterAddress is another machine   the address from which this machine would reach it
//   masterAddress is our own name      the same; if the name resolves to loopback only (as in Debian's /etc/hosts), the
//                                      address of the default route, because others cannot use loopback
//   localhost, loopback, ""            loopback
// It may ask the name service, and then takes as long as that does. `classes`: where the kernel lists devices.
std::string localAddress(const Settings& settings, const std::string& masterAddress,
                         const std::filesystem::path& classes = "/sys/class");

}  // namespace smddp::bootstrap
