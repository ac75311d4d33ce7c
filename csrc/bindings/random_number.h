// A number from torch's default generator, without the tensor that torch would make for it.
#pragma once

#include <pybind11/pybind11.h>

namespace smddp::bindings {

// random_number(below).
void bindRandomNumber(pybind11::module_& m);

}  // namespace smddp::bindings
