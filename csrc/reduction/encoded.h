// reduceEncoded(): sums of float32 vectors that travel in fewer bytes.
//
// The result depends on no instruction set, alignment, number of destinations or floating-point mode, as that of
// reduce(): hosts with different processors decode the same bytes to the same numbers, and encode to the same bytes.
// Numbers are little endian and have no alignment.
//
//   fp32   the numbers themselves.
//   bf16   the upper half of each number, rounded to nearest even. What is too large becomes infinity. Every NaN
//          becomes the canonical one, 0x7fc0.
//   int8   blocks of 256 numbers; the last one may be shorter. A block is its scale, a float32, and then one signed
//          byte for each number, its code. A code times the scale is the number.
//
// How int8 encodes a block, of which m is the largest finite magnitude:
//   * m < 2^-100: the scale is 0 and the codes of all finite numbers are 0. So a block of very small numbers, denormal
//     ones among them, is sent as zeros.
//   * Otherwise the scale is m / 127, and the codes are x * (127 / m), rounded to nearest even: -127 to 127. Each
//     operation is rounded to float32. An m above FLT_MAX * (1 - 2^-20) counts as that, so that rounding takes no
//     finite number to infinity.
//   * A block with infinities or NaNs has a scale with the sign bit set: -m / 126, or -0.0 if m < 2^-100. Its finite
//     numbers have codes from -126 to 126, by x * (126 / m). 127 is +Inf, -127 is -Inf, -128 is NaN.
//   * -0.0 becomes 0.0.
// A finite number is at most 0.5 + 2^-15 scales off: half a scale because codes are integers, the rest because four
// operations round: the scale, the factor, the code before it becomes an integer, and the product in decoding. In a
// block whose scale is 0, it is less than 2^-100 off.
//
// Example: { 1.0, -0.5, 0.3, 0.0 }. m = 1, the scale is 1/127 = 0x3c010204, and the codes are 127, -64 (-63.5 is
// rounded to even), 38 (38.1) and 0. The bytes are 04 02 01 3c 7f c0 26 00; they decode to { 1, -0.50394, 0.29921, 0 }.
//
// Another host wrote the bytes, so any bytes decode to numbers, also those that the encoder never writes:
//   * An infinite or NaN scale makes NaNs of all finite codes.
//   * Without the sign of the scale, a code of -128 is a number like any other.
//   * A product may overflow to infinity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/encoding.h"
#include "common/types.h"
#include "reduction/reduce.h"

namespace smddp::reduction {

// A vector that is encoded, or float32.
struct Source {
  const void* data;
  bool isEncoded;
};
struct Destination {
  void* data;
  bool isEncoded;
};

// dsts = op over srcs, as reduce() of float32, where each vector may be encoded. Only SUM, and AVG, which divides if
// `scale.post` says so. Sources are combined in float32, one after the other in the order given.
//
// If a destination is encoded, the result is encoded once. Then plain destinations get what it decodes to, so all who
// hold the result hold the same bits. A single source that is not scaled is copied: encoded, decoded or neither. An
// encoded one keeps its bytes on the way to encoded destinations.
//
// `residual` is null or has `count` numbers: what encoding lost so far, for error feedback. They are added to the
// result before it is encoded, and then are what that lost: x - decoded(x), or 0 where that is not finite. This needs
// an encoded destination.
//
// A destination may be the same pointer as a source if both are encoded or both plain. Apart from that nothing may
// overlap. Reads every source and writes every destination once. Thread-safe. Allocates nothing. Throws as reduce(),
// before it writes anything.
void reduceEncoded(Wire wire, std::span<const Destination> dsts, std::span<const Source> srcs,
                   size_t count, ReduceOp op, const Scale& scale = {}, float* residual = nullptr);

}  // namespace smddp::reduction
