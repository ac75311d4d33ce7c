// How vectors of float32 travel between nodes.
//
//   fp32   as they are
//   bf16   each element rounded to bfloat16: half the bytes
//   int8   blocks of kBlockElements elements, each a float32 scale and one int8 per element: about a quarter
//
// reduction/encoded.h says how elements are rounded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/types.h"

namespace smddp {

// The value of SMDDP_WIRE or of an option: "fp32", "bf16", "int8" or "auto". All but fp32 may have "+feedback" behind.
struct WireOption {
  std::optional<Wire> wire = Wire::fp32;  // empty: auto, the one that suits the network
  bool feedback = false;                  // error feedback
};

// Throws Usage for other texts. `origin` says in the error where the text was written.
WireOption parseWire(std::string_view text, const char* origin);
std::string toString(const WireOption& option);

// Elements of an int8 vector that share a scale. A part of a vector that begins at a multiple of it can be encoded for
// itself.
inline constexpr size_t kBlockElements = 256;

// The bytes that `count` encoded elements take. Example: 1000 elements as int8 are 4 blocks, 1000 + 4 * 4 = 1016 bytes.
constexpr size_t encodedBytes(Wire wire, size_t count) {
  switch (wire) {
    case Wire::fp32: return 4 * count;
    case Wire::bf16: return 2 * count;
    case Wire::int8: return count + 4 * ((count + kBlockElements - 1) / kBlockElements);
  }
  return 0;
}

}  // namespace smddp
