#include "cuda/capture.h"

#include <dlfcn.h>

namespace smddp::cuda {
namespace {

// As the driver's interface has it, for the one function that is needed of it.
using Function = int (*)(void* stream, int* status);
constexpr int kNotCapturing = 0;
// The answer for the default stream while some other is recorded, which would spoil that.
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
