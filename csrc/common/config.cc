#include "common/config.h"

#include <charconv>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "common/error.h"

namespace smddp {
namespace {

// What does not parse is told with what is allowed, and the default as an example: `value` still has it.
void parse(const char*, const std::string& text, std::string& value) { value = text; }
void parse(const char*, const std::string& text, Secret& value) { value.text = text; }

void parse(const char* name, const std::string& text, bool& value) {
  if (text == "1" || text == "true" || text == "on") {
    value = true;
  } else if (text == "0" || text == "false" || text == "off") {
    value = false;
  } else {
    raise(ErrorKind::Usage,
          "{}={} is no switch; use 1, true or on, or 0, false or off, for example {}={:d}", name,
          text, name, value);
  }
}

void parse(const char* name, const std::string& text, int64_t& value) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) {
    raise(ErrorKind::Usage,
          "{}={} is not a whole number from 0 to {}; write digits only, without a unit, for "
          "example {}={}",
          name, text, std::numeric_limits<int64_t>::max(), name, value);
  }
  value = number;
}

const char* typeName(const std::string&) { return "text"; }
const char* typeName(const Secret&) { return "secret"; }
const char* typeName(bool) { return "switch"; }
const char* typeName(int64_t) { return "integer"; }

void requireAtLeast(const char* name, int64_t value, int64_t least) {
  if (value < least) raise(ErrorKind::Usage, "{}={}: needs at least {}", name, value, least);
}

Settings readSettings() {
  Settings result;
#define SMDDP_READ(type, field, env, value, doc) \
  if (const auto text = environment(env); !text.empty()) parse(env, text, result.field);
  SMDDP_SETTINGS(SMDDP_READ)
#undef SMDDP_READ
  // No plan finds room in less, and no message leaves without a place at its receiver.
  requireAtLeast("SMDDP_POOL_BYTES", result.poolBytes, 16384);
  requireAtLeast("SMDDP_CHUNK_BYTES", result.chunkBytes, 64);
  requireAtLeast("SMDDP_FABRIC_CHUNK_BYTES", result.fabricChunkBytes, 64);
  requireAtLeast("SMDDP_FABRIC_WINDOW", result.fabricWindow, 1);
  return result;
}

}  // namespace

std::string print(const std::string& value) { return value; }
std::string print(const Secret& value) { return value.text.empty() ? "" : "(hidden)"; }
std::string print(bool value) { return value ? "1" : "0"; }
std::string print(int64_t value) { return std::to_string(value); }

std::string environment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

const Settings& settings() {
  static const Settings frozen = readSettings();
  return frozen;
}

std::vector<SettingRow> describeSettings() {
  const Settings defaults;
  std::vector<SettingRow> rows;
#define SMDDP_ROW(type, field, env, value, doc)                                                  \
  rows.push_back({env, typeName(defaults.field), print(settings().field), print(defaults.field), \
                  doc, !environment(env).empty()});
  SMDDP_SETTINGS(SMDDP_ROW)
#undef SMDDP_ROW
  return rows;
}

}  // namespace smddp
