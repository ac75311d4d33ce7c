// Checks the buffers that the bare loops take from Python.
#pragma once

#include <pybind11/pybind11.h>

namespace smddp::bindings {

// Whether it is a contiguous vector of float32.
inline bool isFloatVector(const pybind11::buffer_info& info) {
  return info.ndim == 1 && (info.size < 2 || info.strides[0] == sizeof(float)) &&
         info.format == pybind11::format_descriptor<float>::format();
}

}  // namespace smddp::bindings
