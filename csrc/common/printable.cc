#include "common/printable.h"

#include <cstdint>

namespace smddp {
namespace {

uint8_t at(std::string_view text, size_t i) { return static_cast<uint8_t>(text[i]); }

// The bytes of the first character; 0 if it is invalid (RFC 3629: no overlong forms, no surrogates).
size_t lengthOfCharacter(std::string_view text) {
  const uint8_t first = at(text, 0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  const uint8_t lowest = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  const uint8_t highest = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  if (at(text, 1) < lowest || at(text, 1) > highest) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (at(text, i) < 0x80 || at(text, i) > 0xbf) return 0;
  }
  // U+0080 to U+009F are control characters, too.
  return first == 0xc2 && at(text, 1) < 0xa0 ? 0 : length;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const bool layout = text.front() == '\n' || text.front() == '\t';
    const size_t length = layout ? 1 : lengthOfCharacter(text);
    if (length == 0) {
      result += '?';
    } else {
      result += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result;
}

}  // namespace smddp
