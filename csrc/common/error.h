// The errors that functions throw, and the advice for each kind.
//
//   Usage      the caller asked for something impossible; nothing was started. Fix the call.
//   Mismatch   ranks disagree about which collective this is. The group is broken; fix the script.
//   PeerLost   a rank died, left or became unreachable. The group is broken; rebuild it without that rank.
//   Timeout    the deadline passed while some rank was still missing; the text says which one.
//   Aborted    abort() or shutdown() was called while the operation was in flight.
//   Transport  the network or shared memory failed below us.
//   Resource   the machine refused memory, descriptors or threads.
//   Internal   our own invariant is broken; a bug report is welcome.
//
// "Not yet" (queue full, nothing arrived) is a return value, never an exception.
#pragma once

#include <cerrno>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "common/printable.h"

namespace smddp {

enum class ErrorKind : uint8_t {
  Usage,
  Mismatch,
  PeerLost,
  Timeout,
  Aborted,
  Transport,
  Resource,
  Internal
};

constexpr const char* toString(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::Usage: return "UsageError";
    case ErrorKind::Mismatch: return "CollectiveMismatchError";
    case ErrorKind::PeerLost: return "PeerLostError";
    case ErrorKind::Timeout: return "CollectiveTimeoutError";
    case ErrorKind::Aborted: return "AbortedError";
    case ErrorKind::Transport: return "TransportError";
    case ErrorKind::Resource: return "ResourceError";
    case ErrorKind::Internal: return "InternalError";
  }
  return "?";
}

// The only exception type of the library below process_group. Copyable, so that a Completion can keep the
// first error and rethrow it in every thread that waits.
//
// The text is this class's own and not that of std::runtime_error, which libstdc++ keeps in a string with one static
// object for "empty". torch loads libraries that contain a libstdc++ of their own, and some linkers take functions of
// std::runtime_error from there: an error that had been moved then freed the other copy's static object.
class Error : public std::exception {
 public:
  // printable(), because texts quote peers and the store.
  Error(ErrorKind kind, const std::string& text)
      : kind_(kind), text_(std::make_shared<const std::string>(printable(text))) {}
  ErrorKind kind() const noexcept { return kind_; }
  const char* what() const noexcept override { return text_ ? text_->c_str() : ""; }

 private:
  ErrorKind kind_;
  std::shared_ptr<const std::string> text_;  // null: moved. Shared, so that copies cannot fail.
};

template <typename... Args>
[[noreturn]] void raise(ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(kind, fmt::format(format, std::forward<Args>(args)...));
}

// For failed system calls: appends strerror(errno).
template <typename... Args>
[[noreturn]] void raiseErrno(ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
  const int saved = errno;
  throw Error(kind, fmt::format("{}: {}", fmt::format(format, std::forward<Args>(args)...),
                                std::generic_category().message(saved)));
}

// SMDDP_CHECK checks our own invariants. It is also on in release builds, and throws Internal.
#define SMDDP_CHECK(condition, ...)                                                          \
  do {                                                                                       \
    if (__builtin_expect(!(condition), 0))                                                   \
      ::smddp::raise(::smddp::ErrorKind::Internal, "{}:{}: {}: {}", __FILE_NAME__, __LINE__, \
                     #condition, ::fmt::format(__VA_ARGS__));                                \
  } while (false)

}  // namespace smddp
