// Discovery finds what libfabric and the kernel offer on this machine.
#pragma once

#include <vector>

#include "transport/fabric/fid.h"
#include "transport/fabric/provider.h"

namespace smddp::transport::fabric {

struct Discovery {
  std::vector<ProviderInfo> offered;
  std::vector<const fi_info*> raw;  // raw[i] is the source of offered[i]; `lists` owns it
  std::vector<InfoPtr> lists;
};

// Asks libfabric for all requirements, and then without those of kRelaxations, one more each time. If `devices`, asks
// each time for providers that reach memory of devices first.
Discovery discover(bool devices = false);

}  // namespace smddp::transport::fabric
