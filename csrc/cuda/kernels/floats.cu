#include "cuda/kernels/launch.cuh"

namespace smddp::cuda {

bool launchFloats(const Launcher& launcher, const Job& job) { return visitFloats(launcher, job); }

}  // namespace smddp::cuda
