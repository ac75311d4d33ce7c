#include "common/error.h"
#include "transport/fabric/fabric.h"

namespace smddp::transport::fabric {
namespace {

constexpr const char* kAbsent =
    "smddp was built without libfabric. Set SMDDP_PROVIDER=sockets, or install libfabric >= 1.17 "
    "(package libfabric-dev, or set LIBFABRIC_HOME) and build smddp again";

}  // namespace

std::unique_ptr<Transport> create(const Settings&) { raise(ErrorKind::Usage, "{}", kAbsent); }

std::unique_ptr<Transport> create(const Options&) { raise(ErrorKind::Usage, "{}", kAbsent); }

std::string whyMissing() { return kAbsent; }

}  // namespace smddp::transport::fabric
