#include "process_group/errors.h"

#include <stdexcept>

namespace smddp::process_group {

std::exception_ptr toTorch(const Error& error) {
  if (error.kind() == ErrorKind::Usage) {
    return std::make_exception_ptr(std::invalid_argument(error.what()));
  }
  return std::make_exception_ptr(BackendError(error));
}

void throwAsTorch(const Error& error) { std::rethrow_exception(toTorch(error)); }

}  // namespace smddp::process_group
