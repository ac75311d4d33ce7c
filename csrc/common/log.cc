#include "common/log.h"

#include <unistd.h>

#include <array>
#include <atomic>

#include "common/config.h"
#include "common/error.h"

namespace smddp {
namespace {

constexpr std::array<const char*, 5> kNames = {"error", "warn", "info", "debug", "trace"};
std::atomic<int> logRank{-1};

LogLevel parseLevel(const std::string& text) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (text == kNames[i]) return static_cast<LogLevel>(i);
  }
  raise(ErrorKind::Internal, "{} is not a log level", text);
}

}  // namespace

LogLevel logLevel() noexcept {
  static const LogLevel level = [] {
    try {
      return parseLevel(settings().log);
    } catch (const Error&) {
      return LogLevel::Warn;
    }
  }();
  return level;
}

void setLogRank(int rank) { logRank.store(rank, std::memory_order_relaxed); }

void writeLog(LogLevel level, const char* tag, const std::string& text) {
  const int rank = logRank.load(std::memory_order_relaxed);
  const std::string who = rank < 0 ? "" : fmt::format("[rank {}]", rank);
  const std::string line =
      fmt::format("smddp{}[{}] {}: {}\n", who, tag, kNames[static_cast<size_t>(level)], text);
  // If a log line cannot be written, there is no other place for it.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace smddp
