// dsts = op over srcs, for every element type and reduce operation, as fast as the machine allows.
//
// The numbers do not depend on the instruction set, on alignment, on the number of destinations or
// on the floating-point mode of the calling thread:
//   * sources are combined one after the other, in the order given;
//   * float16 and bfloat16 are computed in float32 over all sources of one call and rounded once;
//   * nothing is contracted into a fused multiply-add, denormals are kept;
//   * MIN and MAX give NaN where any source is NaN; of equal values (-0.0 and 0.0) the first stays;
//   * a NaN that was computed is always the same quiet NaN; what is only copied keeps its bits;
//   * integers wrap, also where they are averaged: the sum is that of the type;
//   * complex numbers are computed part by part;
//   * of truth values SUM, MAX and BOR are "or", PRODUCT, MIN and BAND "and"; results are 0 or 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/types.h"

namespace smddp::reduction {

// What happens to a value besides the operation itself. `pre` goes with PREMUL_SUM and `post` with
// AVG; left false, both are plain sums: what all but the first or last of several reductions want.
struct Scale {
  bool pre = false;     // multiply every source element by `factor`: the sources are raw inputs
  bool post = false;    // divide the result by `divisor`: this is the last reduction
  double factor = 1.0;  // rounded to the type that is computed in
  int64_t divisor = 1;  // positive; quotients of integers are truncated toward zero
};

// dsts[d][i] = op over s of srcs[s][i], for every d and every i < count. Needs at least one source;
// a single one is copied (and scaled). A destination may be the very same pointer as any source; it
// must not overlap one otherwise. Pointers need no alignment. Every source is read and every
// destination written once. Thread-safe, allocates nothing; throws before anything is written.
void reduce(std::span<void* const> dsts, std::span<const void* const> srcs, size_t count,
            DataType type, ReduceOp op, const Scale& scale = {});

// False where the combination has no meaning: bitwise operations of floating-point numbers,
// PREMUL_SUM of integers, AVG and PREMUL_SUM of truth values, all but the sums of complex numbers.
// reduce() throws Usage then.
bool supports(DataType type, ReduceOp op);

enum class SimdLevel : uint8_t { Scalar, Avx2, Avx512 };
const char* toString(SimdLevel level);

// What reduce() uses: the best this processor has, or what SMDDP_SIMD asks for. Decided at the
// first call; throws Usage where SMDDP_SIMD names a level that is unknown or not there.
SimdLevel simdLevel();

}  // namespace smddp::reduction
