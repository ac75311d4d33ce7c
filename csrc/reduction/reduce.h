// reduce(): dsts = op over srcs, for every element type and reduce operation.
//
// The results do not depend on the instruction set, on alignment, on the number of destinations or
// on the floating-point mode of the calling thread:
//   * sources are combined one after the other, in the order given;
//   * float16 and bfloat16 are computed in float32 over all sources of one call and rounded once;
//   * nothing is contracted into a fused multiply-add, denormals are kept;
//   * MIN and MAX give NaN if any source is NaN; of equal values (-0.0 and 0.0) the first one is taken;
//   * a computed NaN is always the same quiet NaN; a value that is only copied keeps its bits;
//   * integers wrap around, also in averages: the sum has the type of the elements;
//   * complex numbers are computed part by part;
//   * for booleans SUM, MAX and BOR are "or", PRODUCT, MIN and BAND are "and"; results are 0 or 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/types.h"

namespace smddp::reduction {

// Scaling besides the operation. `pre` belongs to PREMUL_SUM and `post` to AVG. If a call leaves them false, it does a
// plain sum; so of several reductions in a row only the first, or the last, scales.
struct Scale {
  bool pre = false;     // multiply every source element by `factor`: the sources are raw inputs
  bool post = false;    // divide the result by `divisor`: this is the last reduction
  double factor = 1.0;  // rounded to the type of the computation
  double divisor =
      1;  // positive; of integers a whole number, and quotients are truncated toward zero
};

// dsts[d][i] = op over s of srcs[s][i], for every d and every i < count. Needs at least one source;
// a single one is copied (and scaled). A destination may be the same pointer as a source, but must not
// overlap one partly. Pointers need no alignment. Reads every source and writes every destination once.
// Thread-safe. Allocates nothing. Throws before it writes anything.
void reduce(std::span<void* const> dsts, std::span<const void* const> srcs, size_t count,
            DataType type, ReduceOp op, const Scale& scale = {});

// False for unsupported combinations: bitwise operations of floating-point numbers,
// PREMUL_SUM of integers, AVG and PREMUL_SUM of booleans, and all but sums of complex numbers.
// For these reduce() throws Usage.
bool supports(DataType type, ReduceOp op);

enum class SimdLevel : uint8_t { Scalar, Avx2, Avx512 };
const char* toString(SimdLevel level);

// The level that reduce() uses: the best one of this processor, or the one that SMDDP_SIMD names. Determined on the
// first call; throws Usage if SMDDP_SIMD names a level that is unknown or missing.
SimdLevel simdLevel();

}  // namespace smddp::reduction
