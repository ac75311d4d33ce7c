#include "common/config.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "common/error.h"

namespace smddp {
namespace {

void parse(const char*, const std::string& text, std::string& value) { value = text; }

void parse(const char* name, const std::string& text, bool& value) {
  if (text == "1" || text == "true" || text == "on") {
    value = true;
  } else if (text == "0" || text == "false" || text == "off") {
    value = false;
  } else {
    raise(ErrorKind::Usage, "{}={} is not a switch; use 0 or 1", name, text);
  }
}

void parse(const char* name, const std::string& text, int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    raise(ErrorKind::Usage, "{}={} is not a whole number of at least 0", name, text);
  }
}

std::string print(const std::string& value) { return value; }
std::string print(bool value) { return value ? "1" : "0"; }
std::string print(int64_t value) { return std::to_string(value); }

const char* typeName(const std::string&) { return "text"; }
const char* typeName(bool) { return "switch"; }
const char* typeName(int64_t) { return "integer"; }

Settings readSettings() {
  Settings result;
#define SMDDP_READ(type, field, env, value, doc) \
  if (const auto text = environment(env); !text.empty()) parse(env, text, result.field);
  SMDDP_SETTINGS(SMDDP_READ)
#undef SMDDP_READ
  return result;
}

}  // namespace

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
