// Which of this machine's addresses peers on other nodes should connect to.
#pragma once

#include <string>

#include "common/config.h"

namespace smddp::bootstrap {

// A numeric IPv4 or IPv6 address of one interface, never the wildcard:
//   SMDDP_INTERFACE set         that interface's address; Usage with a list if there is none
//   masterAddress is elsewhere  the address from which this machine would reach it
//   masterAddress is our name   the same; if the name resolves to loopback only (as in Debian's
//                               /etc/hosts), the default route's, since others cannot use loopback
//   localhost, loopback, ""     loopback
// May ask the name service, so it can take as long as that does.
std::string localAddress(const Settings& settings, const std::string& masterAddress);

}  // namespace smddp::bootstrap
