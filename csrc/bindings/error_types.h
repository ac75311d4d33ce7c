// Translates the library's errors to Python exceptions.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace smddp::bindings {

// Defines set_error_types({"PeerLostError": class, ...}), which sets the Python class for each kind of error.
void bindErrorTypes(pybind11::module& m);

// Returns the exception that Python code would catch if `thrown` were thrown; None if there is none.
pybind11::object asPythonError(const std::exception_ptr& thrown);

}  // namespace smddp::bindings
