#include "cuda/kernels/launch.cuh"

namespace smddp::cuda {

bool launchIntegers(const Launcher& launcher, const Job& job) {
  return visitIntegers(launcher, job);
}

}  // namespace smddp::cuda
