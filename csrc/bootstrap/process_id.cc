#include "bootstrap/process_id.h"

#include <sys/random.h>

#include <cerrno>

#include "common/error.h"

namespace smddp::bootstrap {

ProcessId randomProcessId() {
  ProcessId id{};
  ssize_t got = 0;
  // Up to 256 bytes are never returned in part, but a signal may interrupt the wait for the first entropy.
  do {
    got = ::getrandom(id.data(), id.size(), 0);
  } while (got < 0 && errno == EINTR);
  if (got != static_cast<ssize_t>(id.size())) raiseErrno(ErrorKind::Resource, "getrandom failed");
  return id;
}

std::string toString(const ProcessId& id) {
  std::string text;
  for (const std::byte b : id) text += fmt::format("{:02x}", std::to_integer<unsigned>(b));
  return text;
}

}  // namespace smddp::bootstrap
