#include "reduction/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstring>

#include "common/config.h"
#include "common/error.h"
#include "reduction/float_mode.h"
#include "reduction/kernel_table.h"

namespace smddp::reduction {
namespace {

constexpr SimdLevel kAllLevels[] = {SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512};

Kernel kernelAt(const KernelTable& kernels, DataType type, ReduceOp op) {
  return kernels.types[static_cast<size_t>(type)].ops[static_cast<size_t>(op)];
}

void copy(const KernelTable& kernels, std::span<void* const> dsts, const void* src, size_t bytes) {
  if (dsts.size() == 1) {
    if (dsts[0] != src) std::memcpy(dsts[0], src, bytes);
    return;
  }
  // The byte-wise sum of one source is that source. The kernel reads it once and writes all destinations.
  kernelAt(kernels, DataType::uint8,
           ReduceOp::SUM)({dsts.data(), dsts.size(), &src, 1, bytes, 1.0, 1});
}

#if defined(__x86_64__)
// __builtin_cpu_supports() of clang does not know f16c. Asked once: in a virtual machine the instruction takes 20 us.
bool hasF16c() {
  static const bool has = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  }();
  return has;
}
#endif

SimdLevel bestLevel() {
  SimdLevel best = SimdLevel::Scalar;
  for (SimdLevel level : kAllLevels)
    if (kernelsOf(level) != nullptr) best = level;
  return best;
}

}  // namespace

void checkArguments(size_t numSrcs, DataType type, ReduceOp op, const Scale& scale) {
  if (!supports(type, op))
    raise(ErrorKind::Usage, "{} of {} is not supported; use SUM, or another type", toString(op),
          toString(type));
  SMDDP_CHECK(numSrcs > 0, "{} of no sources", toString(op));
  SMDDP_CHECK(!scale.pre || op == ReduceOp::PREMUL_SUM, "a factor with {}", toString(op));
  SMDDP_CHECK(!scale.post || op == ReduceOp::AVG, "a divisor with {}", toString(op));
  SMDDP_CHECK(scale.divisor > 0, "divisor {}", scale.divisor);
}

void reduceWith(const KernelTable& kernels, std::span<void* const> dsts,
                std::span<const void* const> srcs, size_t count, DataType type, ReduceOp op,
                const Scale& scale) {
  checkArguments(srcs.size(), type, op, scale);
  if (count == 0 || dsts.empty()) return;
  // If this call does not scale, AVG and PREMUL_SUM are plain sums.
  const bool scaled = scale.pre || scale.post;
  if (!scaled && (op == ReduceOp::AVG || op == ReduceOp::PREMUL_SUM)) op = ReduceOp::SUM;
  if (!scaled && srcs.size() == 1) return copy(kernels, dsts, srcs[0], count * sizeOf(type));
  const DefaultFloatMode mode;
  kernelAt(kernels, type, op)(
      {dsts.data(), dsts.size(), srcs.data(), srcs.size(), count, scale.factor, scale.divisor});
}

void reduce(std::span<void* const> dsts, std::span<const void* const> srcs, size_t count,
            DataType type, ReduceOp op, const Scale& scale) {
  static const KernelTable& kernels = *kernelsOf(simdLevel());
  reduceWith(kernels, dsts, srcs, count, type, op, scale);
}

bool supports(DataType type, ReduceOp op) { return kernelAt(kScalarKernels, type, op) != nullptr; }

const char* toString(SimdLevel level) {
  switch (level) {
    case SimdLevel::Scalar: return "scalar";
    case SimdLevel::Avx2: return "avx2";
    case SimdLevel::Avx512: return "avx512";
  }
  return "?";
}

const KernelTable* kernelsOf(SimdLevel level) {
  if (level == SimdLevel::Scalar) return &kScalarKernels;
#if defined(__x86_64__)
  // These are exactly the extensions that CMakeLists.txt enables for the respective file.
  const bool avx2 = __builtin_cpu_supports("avx2") && hasF16c();
  if (level == SimdLevel::Avx2) return avx2 ? &kAvx2Kernels : nullptr;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (level == SimdLevel::Avx512) return avx512 ? &kAvx512Kernels : nullptr;
#endif
  return nullptr;
}

SimdLevel parseSimdLevel(std::string_view wanted) {
  if (wanted == "auto") return bestLevel();
  for (SimdLevel level : kAllLevels) {
    if (wanted != toString(level)) continue;
    if (kernelsOf(level) == nullptr)
      raise(ErrorKind::Usage,
            "SMDDP_SIMD={}: this processor has no {} for the kernels; {} is its best. Unset it.",
            wanted, wanted, toString(bestLevel()));
    return level;
  }
  raise(ErrorKind::Internal, "{} is not a level", wanted);
}

SimdLevel simdLevel() {
  static const SimdLevel level = parseSimdLevel(settings().simd);
  return level;
}

}  // namespace smddp::reduction
