#include "common/config.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "common/error.h"

namespace smddp {
namespace {

// The errors say what is allowed, and give the default as an example: `value` still has it.
// The store has texts that are signed with the secret: a short one can be guessed from them.
constexpr size_t kShortestSecret = 16;

void parse(const char* name, const std::string& text, Secret& value, const Allowed&) {
  if (!text.empty() && text.size() < kShortestSecret) {
    raise(ErrorKind::Usage,
          "{} has {} characters, and needs at least {}: take the output of `openssl rand -hex 16`",
          name, text.size(), kShortestSecret);
  }
  value.text = text;
}

void parse(const char* name, const std::string& text, FilePattern& value, const Allowed&) {
  value.text = text;
  value.check(name);
}

bool isAmong(std::string_view text, std::string_view words) {
  while (!words.empty()) {
    const auto word = words.substr(0, words.find_first_of(", "));
    if (text == word && word != "or") return true;
    words.remove_prefix(std::min(word.size() + 1, words.size()));
  }
  return false;
}

void parse(const char* name, const std::string& text, std::string& value, const Allowed& allowed) {
  if (!allowed.words.empty() && !isAmong(text, allowed.words)) {
    raise(ErrorKind::Usage, "{}={}: expects {}; unset it for {}", name, text, allowed.words, value);
  }
  value = text;
}

void parse(const char* name, const std::string& text, bool& value, const Allowed&) {
  if (text == "1" || text == "true" || text == "on") {
    value = true;
  } else if (text == "0" || text == "false" || text == "off") {
    value = false;
  } else {
    raise(ErrorKind::Usage,
          "{}={} is not a switch; use 1, true or on, or 0, false or off, for example {}={:d}", name,
          text, name, value);
  }
}

void parse(const char* name, const std::string& text, int64_t& value, const Allowed& allowed) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < allowed.least ||
      number > allowed.most) {
    raise(ErrorKind::Usage,
          "{}={} is not a whole number of {} from {} to {}; write digits only, without a unit, for "
          "example {}={} (the default), or unset it",
          name, text, allowed.unit, allowed.least, allowed.most, name, value);
  }
  value = number;
}

// The allowed range as a sentence for the documentation. It leaves out the upper limit of sizes.
std::string sentenceOn(const Allowed& allowed) {
  if (allowed.most == 0) return "";  // no number
  if (allowed.most < kMostBytes) {
    return fmt::format(" From {} to {} {}.", allowed.least, allowed.most, allowed.unit);
  }
  return allowed.least > 0 ? fmt::format(" At least {} {}.", allowed.least, allowed.unit) : "";
}

const char* typeName(const std::string&) { return "text"; }
const char* typeName(const Secret&) { return "secret"; }
const char* typeName(const FilePattern&) { return "file"; }
const char* typeName(bool) { return "switch"; }
const char* typeName(int64_t) { return "integer"; }

template <class T>
void read(const char* name, T& value, const Allowed& allowed, std::string& errors) {
  const std::string text = environment(name);
  if (text.empty()) return;
  try {
    parse(name, text, value, allowed);
  } catch (const Error& error) {
    if (!errors.empty()) errors += "; and ";
    errors += error.what();
  }
}

// One error names all that is wrong, so that nobody has to start a job once for each.
Settings readSettings() {
  Settings result;
  std::string errors;
#define SMDDP_READ(type, field, env, value, doc, ...) \
  read(env, result.field, Allowed{__VA_ARGS__}, errors);
  SMDDP_SETTINGS(SMDDP_READ)
#undef SMDDP_READ
  if (!errors.empty()) raise(ErrorKind::Usage, "{}", errors);
  return result;
}

}  // namespace

std::string print(const std::string& value) { return value; }
std::string print(const Secret& value) { return value.text.empty() ? "" : "(hidden)"; }
std::string print(const FilePattern& value) { return value.text; }
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

std::vector<std::string> settingNames() {
#define SMDDP_NAME(type, field, env, ...) env,
  return {SMDDP_SETTINGS(SMDDP_NAME)};
#undef SMDDP_NAME
}

std::vector<SettingRow> describeSettings() {
  const Settings defaults;
  std::vector<SettingRow> rows;
  bool isExpert = false;
#define SMDDP_ROW(type, field, env, value, doc, ...)                                             \
  rows.push_back({env, typeName(defaults.field), print(settings().field), print(defaults.field), \
                  doc + sentenceOn(Allowed{__VA_ARGS__}), !environment(env).empty(), isExpert});
  SMDDP_USER_SETTINGS(SMDDP_ROW)
  isExpert = true;
  SMDDP_EXPERT_SETTINGS(SMDDP_ROW)
#undef SMDDP_ROW
  return rows;
}

}  // namespace smddp
