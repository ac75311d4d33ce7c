// A bare exchange over sockets, without plans and messages: the bound of allreduce between nodes of one rank.
#pragma once

#include <pybind11/pybind11.h>

namespace smddp::bindings {

// The class BareExchange(sockets, rank), with sum_in_place(buffer, timeout).
void bindBareExchange(pybind11::module& m);

}  // namespace smddp::bindings
