#include "common/encoding.h"

#include "common/error.h"

namespace smddp {

constexpr std::string_view kFeedback = "+feedback";

WireOption parseWire(std::string_view text, const char* origin) {
  WireOption option;
  std::string_view name = text;
  if (name.ends_with(kFeedback)) {
    option.feedback = true;
    name.remove_suffix(kFeedback.size());
  }
  option.wire.reset();
  if (name == "auto") return option;
  for (const Wire wire : {Wire::fp32, Wire::bf16, Wire::int8}) {
    if (name == toString(wire)) option.wire = wire;
  }
  if (!option.wire) {
    raise(ErrorKind::Usage,
          "{}={}: write fp32, bf16, int8 or auto; for error feedback bf16+feedback, int8+feedback "
          "or auto+feedback",
          origin, text);
  }
  if (option.feedback && option.wire == Wire::fp32) {
    raise(ErrorKind::Usage, "{}={}: fp32 loses nothing, so there is no error to feed back", origin,
          text);
  }
  return option;
}

std::string toString(const WireOption& option) {
  std::string text = option.wire ? toString(*option.wire) : "auto";
  if (option.feedback) text += kFeedback;
  return text;
}

}  // namespace smddp
