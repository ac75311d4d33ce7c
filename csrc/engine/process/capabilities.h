// Says what this build can do on this machine, for layers that may not include those below the engine.
#pragma once

#include <string>

#include "common/config.h"
#include "common/types.h"

namespace smddp::engine::process {

// True if the combination has a meaning and a kernel.
bool canReduce(DataType type, ReduceOp op);

struct Capabilities {
  std::string simd;      // instruction set of the reduction kernels
  std::string noFabric;  // why libfabric cannot be used; empty if it can
};
Capabilities capabilities();

// The address of this machine to which processes of other nodes connect; see bootstrap/local_address.h.
std::string addressForPeers(const Settings& settings);

}  // namespace smddp::engine::process
