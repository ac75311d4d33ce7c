// A bare sum loop, without communication: the upper bound for reductions in shared memory.
#pragma once

#include <pybind11/pybind11.h>

namespace smddp::bindings {

// sum_in_place(buffers).
void bindBareLoop(pybind11::module& m);

}  // namespace smddp::bindings
