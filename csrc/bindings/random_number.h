// A random number from torch's default generator, without making a tensor.
#pragma once

#include <pybind11/pybind11.h>

namespace smddp::bindings {

// Defines random_number(below).
void bindRandomNumber(pybind11::module_& m);

}  // namespace smddp::bindings
