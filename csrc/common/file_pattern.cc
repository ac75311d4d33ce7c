#include "common/file_pattern.h"

#include <unistd.h>

#include <array>
#include <string_view>

#include "common/error.h"

namespace smddp {
namespace {

constexpr std::string_view kLetters = "hpr%";

}  // namespace

bool FilePattern::names(char what) const {
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    if (text[i] != '%') continue;
    if (text[++i] == what) return true;
  }
  return false;
}

void FilePattern::check(const char* setting) const {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') continue;
    if (++i < text.size() && kLetters.find(text[i]) != std::string_view::npos) continue;
    raise(ErrorKind::Usage,
          "{}={}: expects a path in which %h (host), %p (process), %r (rank) or %% may stand",
          setting, text);
  }
}

std::optional<std::string> FilePattern::path(int rank) const {
  if (rank < 0 && names('r')) return std::nullopt;
  std::string path;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%' || i + 1 == text.size()) {
      path += text[i];
      continue;
    }
    switch (text[++i]) {
      case 'h': path += hostName(); break;
      case 'p': path += std::to_string(getpid()); break;
      case 'r': path += std::to_string(rank); break;
      default: path += text[i];
    }
  }
  return path;
}

std::string hostName() {
  // One byte more than Linux allows, which is 0.
  std::array<char, 65> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "localhost";
  return name.data();
}

}  // namespace smddp
