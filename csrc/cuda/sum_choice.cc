#include "cuda/sum_choice.h"

#include <algorithm>

#include "common/error.h"

namespace smddp::cuda {

SumSetting parseSumSetting(const std::string& setting) {
  if (setting == "auto") return SumSetting::Auto;
  if (setting == "cpu") return SumSetting::Cpu;
  if (setting == "gpu") return SumSetting::Gpu;
  raise(ErrorKind::Internal, "{} is no place to sum", setting);
}

SumTimes slowest(std::span<const SumTimes> ranks) {
  SumTimes most;
  for (const SumTimes& times : ranks) {
    most.cpu = std::max(most.cpu, times.cpu);
    most.gpu = std::max(most.gpu, times.gpu);
  }
  return most;
}

SumPlace chooseSum(const SumTimes& slowest) {
  // Less than nine tenths of the CPU's time.
  return slowest.gpu < slowest.cpu - slowest.cpu / 10 ? SumPlace::Gpu : SumPlace::Cpu;
}

}  // namespace smddp::cuda
