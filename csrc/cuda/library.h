// The CUDA part, loaded when it is first needed.
#pragma once

#include <string>

#include "cuda/device_table.h"

namespace smddp::cuda {

// The functions of the library at this path, which stays loaded. Throws Resource, with a text for the user, where the
// library is missing, cannot be loaded, or belongs to another build. Thread-safe.
const DeviceTable& loadLibrary(const std::string& path);

// Throws Transport unless the function that did `what` returned 0.
void check(const DeviceTable& table, int error, const char* what);

}  // namespace smddp::cuda
