// What `python -m smddp.plan` needs: plans as text, and the checker.
#pragma once

#include <pybind11/pybind11.h>

namespace smddp::bindings {

// list_algorithms(), print_plan(...), check_plan(...).
void bindPlanTool(pybind11::module& m);

}  // namespace smddp::bindings
