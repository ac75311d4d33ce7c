// Chooses the address of this machine to which peers on other nodes connect.
#pragma once

#include <string>

#include "common/config.h"

namespace smddp::bootstrap {

// Returns a numeric IPv4 or IPv6 address of one interface, never the wildcard:
//   SMDDP_INTERFACE is set             that interface's address; throws Usage, with a list, if there is none
//   masterAddress is another machine   the address from which this machine would reach it
//   masterAddress is our own name      the same; if the name resolves to loopback only (as in Debian's /etc/hosts), the
//                                      address of the default route, because others cannot use loopback
//   localhost, loopback, ""            loopback
// It may ask the name service, and then takes as long as that does.
std::string localAddress(const Settings& settings, const std::string& masterAddress);

}  // namespace smddp::bootstrap
