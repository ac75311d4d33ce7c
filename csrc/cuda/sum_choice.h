// Whether the CPU or the GPU sums between nodes (path "rails"), after NCCL has summed inside them. All ranks decide
// from the same facts. Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace smddp::cuda {

enum class SumPlace : uint8_t { Cpu, Gpu };
constexpr const char* toString(SumPlace place) { return place == SumPlace::Gpu ? "gpu" : "cpu"; }

// The value of SMDDP_GPU_SUM.
enum class SumSetting : uint8_t { Auto, Cpu, Gpu };
SumSetting parseSumSetting(const std::string& setting);

// How long a sum took on one rank each way, in nanoseconds.
struct SumTimes {
  int64_t cpu = 0;
  int64_t gpu = 0;
};
// The longest times of any rank, since all ranks wait for the slowest.
SumTimes slowest(std::span<const SumTimes> ranks);
// Chooses the GPU only where that is clearly faster, since the GPU has the training to do.
SumPlace chooseSum(const SumTimes& slowest);

}  // namespace smddp::cuda
