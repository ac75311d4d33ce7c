// The transport between nodes, over whatever network libfabric drives.
//
// It does not include libfabric's headers; a build without libfabric has the same functions (absent.cc).
#pragma once

#include <memory>
#include <string>

#include "common/config.h"
#include "transport/fabric/provider.h"
#include "transport/transport.h"

namespace smddp::transport::fabric {

// Takes the options from the settings and the launcher's variables. Throws Usage if there is no usable provider.
std::unique_ptr<Transport> create(const Settings& settings);
// Takes the caller's options.
std::unique_ptr<Transport> create(const Options& options);

// Why libfabric cannot be used at all; empty if it can.
std::string whyMissing();

}  // namespace smddp::transport::fabric
