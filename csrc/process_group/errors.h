// The library's errors as torch's exceptions, which Python code catches.
#pragma once

#include <c10/util/Exception.h>

#include <exception>

#include "common/error.h"

namespace smddp::process_group {

// Seen in Python as smddp.PeerLostError and its siblings, all of them torch.distributed.DistBackendError.
class BackendError : public c10::DistBackendError {
 public:
  explicit BackendError(const smddp::Error& error)
      : c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, error.what()),
        kind_(error.kind()) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
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
