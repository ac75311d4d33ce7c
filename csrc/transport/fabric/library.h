// The functions that libfabric exports, found when the first of them is needed. Everything else of it is reached
// through tables in its objects.
//
// It is not linked: what is linked is loaded with the module, and distributions make libfabric load the PSM
// libraries, which measure the processor's clock for 0.2 s then. A job on a single node never needs any of this.
#pragma once

#include <rdma/fabric.h>

namespace smddp::transport::fabric {

struct Library {
  decltype(&fi_getinfo) getInfo;
  decltype(&fi_dupinfo) dupInfo;  // of nothing: a new one
  decltype(&fi_freeinfo) freeInfo;
  decltype(&fi_fabric) openFabric;
  decltype(&fi_version) version;
  decltype(&fi_strerror) describeError;
};

// Loads it at the first call, for good. Throws Usage when it cannot be loaded. [thread-safe]
const Library& library();

}  // namespace smddp::transport::fabric
