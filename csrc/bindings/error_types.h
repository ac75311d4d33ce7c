// Translates the library's errors to Python exceptions.
#pragma once

#include <pybind11/pybind11.h>

namespace smddp::bindings {

// Defines set_error_types({"PeerLostError": class, ...}), which sets the Python class for each kind of error.
void bindErrorTypes(pybind11::module& m);

}  // namespace smddp::bindings
