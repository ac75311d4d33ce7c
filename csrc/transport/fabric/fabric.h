// The transport between nodes, over whatever network libfabric drives.
//
// Free of libfabric's headers: a build without it has the same two functions (absent.cc).
#pragma once

#include <memory>
#include <string>

#include "transport/fabric/provider.h"
#include "transport/transport.h"

namespace smddp::transport::fabric {

// By the settings and the launcher's variables. Throws Usage when nothing usable is there.
std::unique_ptr<Transport> create();
// By what the caller asks for.
std::unique_ptr<Transport> create(const Options& options);

// Whether create() would find a provider; otherwise `why` gets the reason. `why` may be null.
bool available(std::string* why);

}  // namespace smddp::transport::fabric
