// What libfabric and the kernel offer on this machine.
#pragma once

#include <string>
#include <vector>

#include "transport/fabric/fid.h"
#include "transport/fabric/provider.h"

namespace smddp::transport::fabric {

struct Discovery {
  std::vector<ProviderInfo> offered;
  std::vector<const fi_info*> raw;  // raw[i] is what offered[i] was read from; lives in `lists`
  std::vector<InfoPtr> lists;
};

// Asks libfabric with the full wish and then with each relaxation; with `devices` each time for memory of devices first.
Discovery discover(bool devices = false);

// Our own numeric address on the way to `host`; empty when the host is unknown or tells nothing: a host name that
// stands for a loopback address means another interface on every other host.
std::string routeTo(const std::string& host);

}  // namespace smddp::transport::fabric
