#include "engine/process/capabilities.h"

#include "bootstrap/local_address.h"
#include "reduction/reduce.h"
#include "transport/congestion.h"
#include "transport/fabric/fabric.h"

namespace smddp::engine::process {

bool canReduce(DataType type, ReduceOp op) { return reduction::supports(type, op); }

Capabilities capabilities() {
  Capabilities result;
  result.simd = reduction::toString(reduction::simdLevel());
  result.noFabric = transport::fabric::whyMissing();
  return result;
}

std::string addressForPeers(const Settings& settings) {
  return bootstrap::localAddress(settings, environment("MASTER_ADDR"));
}

CongestionControl congestionControl(const Settings& settings) {
  const transport::CongestionChooser chooser(settings.congestionControl);
  return {chooser.system(), chooser.onShortPaths(), chooser.describe(), chooser.isHindered()};
}

void setCongestionControl(const Settings& settings, int socket) {
  transport::NetworkPath path;
  transport::CongestionChooser(settings.congestionControl).review(socket, path);
}

}  // namespace smddp::engine::process
