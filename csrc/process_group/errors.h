// The library's errors as torch's exceptions, which Python code catches.
#pragma once

#include <c10/util/Exception.h>

#include <exception>

#include <fmt/format.h>

#include "common/error.h"

namespace smddp::process_group {

// Seen in Python as smddp.errors.SMDDPPeerLostError and its siblings, all torch.distributed.DistBackendError. DDP
// passes on only the text of c10's error, and launchers search logs for the class name; so the text begins with that
// name.
class BackendError : public c10::DistBackendError {
 public:
  explicit BackendError(const smddp::Error& error)
      : c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                              fmt::format("SMDDP{}: {}", toString(error.kind()), error.what())),
        error_(error) {}
  ErrorKind kind() const { return error_.kind(); }
  // Without the name of the class.
  const char* text() const { return error_.what(); }

 private:
  smddp::Error error_;  // "Error" alone would be that of c10
};

// Usage errors become ValueError, all others BackendError.
std::exception_ptr toTorch(const Error& error);
[[noreturn]] void throwAsTorch(const Error& error);

// Runs `action`, translating what it throws.
template <typename Action>
auto translated(const Action& action) {
  try {
    return action();
  } catch (const Error& error) {
    throwAsTorch(error);
  }
}

}  // namespace smddp::process_group
