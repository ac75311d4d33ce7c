// The functions that libfabric exports, loaded on the first use. All its other functions are called through tables in
// its objects.
//
// We do not link libfabric, because a linked library is loaded with the module. Distributions' libfabric loads the PSM
// libraries, which measure the processor's clock for 0.2 s. A job on a single node does not need libfabric.
#pragma once

#include <rdma/fabric.h>

namespace smddp::transport::fabric {

struct Library {
  decltype(&fi_getinfo) getInfo;
  decltype(&fi_dupinfo) dupInfo;  // with null: makes a new one
  decltype(&fi_freeinfo) freeInfo;
  decltype(&fi_fabric) openFabric;
  decltype(&fi_version) version;
  decltype(&fi_strerror) describeError;
};

// Loads the library on the first call; it stays loaded. Throws Usage if it cannot be loaded. Thread-safe.
const Library& library();

}  // namespace smddp::transport::fabric
