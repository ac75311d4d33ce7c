#include "common/error.h"
#include "transport/fabric/fabric.h"

namespace smddp::transport::fabric {
namespace {

constexpr const char* kAbsent =
    "built without libfabric: all ranks must share one node. For several nodes install libfabric "
    ">= 1.17 "
    "(package libfabric-dev, or set LIBFABRIC_HOME) and build smddp again";

}  // namespace

std::unique_ptr<Transport> create() { raise(ErrorKind::Usage, "{}", kAbsent); }

std::unique_ptr<Transport> create(const Options&) { return create(); }

bool available(std::string* why) {
  if (why != nullptr) *why = kAbsent;
  return false;
}

}  // namespace smddp::transport::fabric
