#include "common/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <system_error>

#include "common/config.h"
#include "common/error.h"

namespace smddp {
namespace {

constexpr std::array<const char*, 5> kNames = {"error", "warn", "info", "debug", "trace"};
std::atomic<int> logRank{-1};
// The process that has opened the log file, and the descriptor; 0: none has. A child of fork() opens a file of its own.
std::atomic<uint64_t> logFile{0};

void print(int descriptor, const std::string& line) {
  // If a log line cannot be written, there is no other place for it.
  [[maybe_unused]] const auto written = ::write(descriptor, line.data(), line.size());
}

FilePattern logFilePattern() {
  try {
    return settings().logFile;
  } catch (const Error&) {
    return {};
  }
}

// Without a lock: a thread of the parent may have held it when this process was forked.
int logDescriptor() {
  const auto me = static_cast<uint64_t>(getpid()) << 32;
  const auto descriptorIn = [](uint64_t opened) { return static_cast<int>(opened & 0xffffffff); };
  uint64_t opened = logFile.load(std::memory_order_acquire);
  if (opened >> 32 == me >> 32) return descriptorIn(opened);
  const FilePattern pattern = logFilePattern();
  const auto path = pattern.path(processRank());
  if (pattern.empty() || !path) return STDERR_FILENO;
  const int file = ::open(path->c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  const int reason = errno;
  const uint64_t mine = me | static_cast<uint64_t>(file < 0 ? STDERR_FILENO : file);
  if (!logFile.compare_exchange_strong(opened, mine)) {
    // Another thread was faster.
    if (file >= 0) ::close(file);
    return descriptorIn(opened);
  }
  if (file < 0) {
    print(STDERR_FILENO,
          fmt::format(
              "smddp: cannot write to {} ({}), which SMDDP_LOG_FILE={} names: the log goes to "
              "the standard error\n",
              *path, std::generic_category().message(reason), pattern.text));
  }
  return descriptorIn(mine);
}

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

int processRank() {
  const int rank = logRank.load(std::memory_order_relaxed);
  if (rank >= 0) return rank;
  const std::string text = environment("RANK");
  int given = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), given);
  return error == std::errc() && end == text.data() + text.size() ? given : -1;
}

void writeLog(LogLevel level, const char* tag, const std::string& text) {
  const int rank = logRank.load(std::memory_order_relaxed);
  const std::string who = rank < 0 ? "" : fmt::format("[rank {}]", rank);
  print(logDescriptor(),
        fmt::format("smddp{}[{}] {}: {}\n", who, tag, kNames[static_cast<size_t>(level)], text));
}

}  // namespace smddp
