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

// The congestion control of TCP sockets between nodes on this host; see transport/congestion.h.
struct CongestionControl {
  std::string system, onShortPaths;
  std::string text;  // what connections have, and why
  bool isHindered = false;
};
CongestionControl congestionControl(const Settings& settings);
// Gives it to a socket that others than the transport use, before and after it is connected.
void setCongestionControl(const Settings& settings, int socket);

}  // namespace smddp::engine::process
