// The library's errors as Python exceptions.
#pragma once

#include <pybind11/pybind11.h>

namespace smddp::bindings {

// set_error_types({"PeerLostError": class, ...}): what errors of these kinds become in Python.
void bindErrorTypes(pybind11::module& m);

}  // namespace smddp::bindings
