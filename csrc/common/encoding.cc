#include "common/encoding.h"

#include "common/error.h"

namespace smddp {

Wire parseWire(std::string_view text, const char* origin) {
  for (const Wire wire : {Wire::fp32, Wire::bf16, Wire::int8}) {
    if (text == toString(wire)) return wire;
  }
  raise(ErrorKind::Usage, "{}={}: write fp32, bf16 or int8", origin, text);
}

}  // namespace smddp
