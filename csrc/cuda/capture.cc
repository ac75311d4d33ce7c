#include "cuda/capture.h"

#include <dlfcn.h>

namespace smddp::cuda {
namespace {

// The type of the one function of the driver that is needed.
using Function = int (*)(void* stream, int* status);
constexpr int kNotCapturing = 0;
// The driver's answer for the default stream while another stream is captured: using it would end the capture.
constexpr int kWouldSpoilCapture = 906;

Function find() {
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return nullptr;
  return reinterpret_cast<Function>(dlsym(driver, "cuStreamIsCapturing"));
}

}  // namespace

bool isCapturing(void* stream) {
  static const Function function = find();
  if (function == nullptr) return false;
  int status = kNotCapturing;
  const int error = function(stream, &status);
  return error == 0 ? status != kNotCapturing : error == kWouldSpoilCapture;
}

}  // namespace smddp::cuda
