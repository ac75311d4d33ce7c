// Bindings for `smddp plan`: plans as text, and the checker.
#pragma once

#include <pybind11/pybind11.h>

namespace smddp::bindings {

// Defines list_algorithms(), print_plan(...) and check_plan(...).
void bindPlanTool(pybind11::module& m);

}  // namespace smddp::bindings
