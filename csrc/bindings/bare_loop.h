// What bounds a reduction in shared memory: the sum without anything around it.
#pragma once

#include <pybind11/pybind11.h>

namespace smddp::bindings {

// sum_in_place(buffers).
void bindBareLoop(pybind11::module& m);

}  // namespace smddp::bindings
