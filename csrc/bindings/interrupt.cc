#include "bindings/interrupt.h"

#include <torch/csrc/utils/pybind.h>

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <vector>

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

void endPythonOf(const char* threadName) {
  // PyThreadState_SetAsyncExc() changes no list of threads, but takes the lock of it: so the numbers are collected
  // first.
  std::vector<unsigned long> found;
  for (auto* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); thread != nullptr;
       thread = PyThreadState_Next(thread)) {
    std::array<char, 16> name{};
    const auto number = thread->thread_id;
    if (number == PyThread_get_thread_ident() ||
        pthread_getname_np(static_cast<pthread_t>(number), name.data(), name.size()) != 0) {
      continue;
    }
    if (std::strcmp(name.data(), threadName) == 0) found.push_back(number);
  }
  for (const auto number : found) PyThreadState_SetAsyncExc(number, PyExc_SystemExit);
}

void installInterruptCheck() { setInterruptCheck(&runSignalHandlers); }

}  // namespace smddp::bindings
