// The log: one write(2) per line, "smddp[rank 3][transport/fabric] text", to the standard error or to the file that
// SMDDP_LOG_FILE names. A line goes to the standard error if the name depends on the rank, and the rank is not known
// yet; so do all lines if the file cannot be opened.
//
//   error   something failed, and no exception tells the user
//   warn    the user should change something; also every fallback, once
//   info    the choices made and their reasons, once per process group
//   debug   one line per connection, group and plan built
//   trace   one line per operation
#pragma once

#include <string>

#include <fmt/format.h>

namespace smddp {

enum class LogLevel : int { Error = 0, Warn, Info, Debug, Trace };

// By SMDDP_LOG; warn if any setting is invalid, because code that reports that may log.
LogLevel logLevel() noexcept;
// The rank printed in front of every line; -1 (none) until the default group is made.
void setLogRank(int rank);
// The rank of setLogRank(). Until the default group is made, the rank that the launcher has given to this process
// (RANK), if it has.
int processRank();
void writeLog(LogLevel level, const char* tag, const std::string& text);

#define SMDDP_LOG(level, tag, ...)                                                  \
  do {                                                                              \
    if (::smddp::LogLevel::level <= ::smddp::logLevel())                            \
      ::smddp::writeLog(::smddp::LogLevel::level, tag, ::fmt::format(__VA_ARGS__)); \
  } while (false)

}  // namespace smddp
