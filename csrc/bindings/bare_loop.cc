#include "bindings/bare_loop.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "bindings/every_cpu.h"
#include "bindings/float_buffer.h"

namespace py = pybind11;

namespace smddp::bindings {
namespace {

// Two buffers: the common case. The compiler vectorises it without help.
SMDDP_EVERY_CPU void sumTwo(float* __restrict a, float* __restrict b, size_t count) {
  for (size_t i = 0; i < count; ++i) a[i] = b[i] = a[i] + b[i];
}

// Sums in blocks that stay in the L1 cache, so that each buffer is read and written once.
SMDDP_EVERY_CPU void sumMany(const std::vector<float*>& buffers, size_t count) {
  constexpr size_t kBlock = 1024;
  float sums[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    std::copy_n(buffers[0] + begin, n, sums);
    for (size_t b = 1; b < buffers.size(); ++b) {
      const float* from = buffers[b] + begin;
      for (size_t i = 0; i < n; ++i) sums[i] += from[i];
    }
    for (float* buffer : buffers) std::copy_n(sums, n, buffer + begin);
  }
}

void sumInPlace(const std::vector<py::buffer>& buffers) {
  std::vector<float*> floats;
  py::ssize_t count = 0;
  for (const py::buffer& buffer : buffers) {
    const py::buffer_info info = buffer.request(/*writable=*/true);
    if (!isFloatVector(info) || (!floats.empty() && info.size != count)) {
      throw std::invalid_argument("expects contiguous buffers of float32, all of one length");
    }
    count = info.size;
    floats.push_back(static_cast<float*>(info.ptr));
  }
  if (floats.size() < 2) throw std::invalid_argument("expects at least two buffers");
  const py::gil_scoped_release release;
  if (floats.size() == 2) {
    sumTwo(floats[0], floats[1], static_cast<size_t>(count));
  } else {
    sumMany(floats, static_cast<size_t>(count));
  }
}

}  // namespace

void bindBareLoop(py::module& m) { m.def("sum_in_place", &sumInPlace, py::arg("buffers")); }

}  // namespace smddp::bindings
