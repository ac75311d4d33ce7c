// Where ranks that NCCL has summed inside nodes are summed between them (path "rails"), decided from what all ranks know
// alike. Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace smddp::cuda {

enum class SumPlace : uint8_t { Cpu, Gpu };
constexpr const char* toString(SumPlace place) { return place == SumPlace::Gpu ? "gpu" : "cpu"; }

// What SMDDP_GPU_SUM says.
enum class SumSetting : uint8_t { Auto, Cpu, Gpu };
SumSetting parseSumSetting(const std::string& setting);

// What a sum took on one rank, in nanoseconds, either way.
struct SumTimes {
  int64_t cpu = 0;
  int64_t gpu = 0;
};
// Of all ranks: the slowest counts, since all wait for it.
SumTimes slowest(std::span<const SumTimes> ranks);
// The GPU has other things to do: it is taken only where that is clearly quicker.
SumPlace chooseSum(const SumTimes& slowest);

}  // namespace smddp::cuda
