#include "bindings/interrupt.h"

#include <torch/csrc/utils/pybind.h>

#include <sys/syscall.h>
#include <unistd.h>

#include "common/interrupt.h"

namespace py = pybind11;

namespace smddp::bindings {
namespace {

// Runs the handlers of signals that have come. What one of them raises passes through the wait as an exception of C++.
void runSignalHandlers() {
  // Python runs handlers on the main thread only.
  if (::syscall(SYS_gettid) != ::getpid() || Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

void installInterruptCheck() { setInterruptCheck(&runSignalHandlers); }

}  // namespace smddp::bindings
