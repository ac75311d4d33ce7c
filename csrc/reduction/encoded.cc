#include "reduction/encoded.h"

#include <algorithm>

#include "common/error.h"
#include "reduction/float_mode.h"
#include "reduction/kernel_table.h"

namespace smddp::reduction {

void reduceEncodedWith(const KernelTable& kernels, Wire wire, std::span<const Destination> dsts,
                       std::span<const Source> srcs, size_t count, ReduceOp op, const Scale& scale,
                       float* residual) {
  if (op != ReduceOp::SUM && op != ReduceOp::AVG)
    raise(ErrorKind::Usage, "{} of vectors encoded as {} is not supported; use SUM or AVG",
          toString(op), toString(wire));
  checkArguments(srcs.size(), DataType::float32, op, scale);
  SMDDP_CHECK(residual == nullptr || std::ranges::any_of(dsts, &Destination::isEncoded),
              "a residual of {} without an encoded destination", toString(op));
  if (count == 0 || dsts.empty()) return;
  const DefaultFloatMode mode;
  kernels.wires[static_cast<size_t>(wire)]({dsts.data(), dsts.size(), srcs.data(), srcs.size(),
                                            count, scale.post, scale.divisor, residual});
}

void reduceEncoded(Wire wire, std::span<const Destination> dsts, std::span<const Source> srcs,
                   size_t count, ReduceOp op, const Scale& scale, float* residual) {
  static const KernelTable& kernels = *kernelsOf(simdLevel());
  reduceEncodedWith(kernels, wire, dsts, srcs, count, op, scale, residual);
}

}  // namespace smddp::reduction
