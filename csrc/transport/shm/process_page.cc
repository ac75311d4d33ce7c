#include "transport/shm/process_page.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>

#include "common/error.h"

namespace smddp::transport::shm {
namespace {

void initLifeLock(pthread_mutex_t* mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int error = pthread_mutex_init(mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  SMDDP_CHECK(error == 0, "pthread_mutex_init: {}", std::strerror(error));
}

}  // namespace

ProcessPage::ProcessPage(const Nonce& slabNonce)
    : pid(getpid()), startTime(startTimeOf(getpid()).value_or(0)), nonce(slabNonce) {
  initLifeLock(&lifeLock);
}

void ProcessPage::leave(std::string_view reason) {
  // Write the text first, so that a mate that sees Left also sees the reason.
  farewell.write(reason);
  Life expected = Life::Running;
  life.compare_exchange_strong(expected, Life::Left, std::memory_order_acq_rel);
}

std::optional<ProcessStat> statOf(int32_t pid) {
  const std::string path = fmt::format("/proc/{}/stat", pid);
  const std::unique_ptr<FILE, int (*)(FILE*)> file(fopen(path.c_str(), "re"), fclose);
  if (!file && errno != ENOENT && errno != ESRCH) return std::nullopt;
  if (!file) return ProcessStat{};
  char text[1024];
  const size_t length = fread(text, 1, sizeof text - 1, file.get());
  text[length] = '\0';
  // The second field is the program's name in parentheses. The name may contain any character.
  const char* rest = std::strrchr(text, ')');
  char state = 0;
  long threads = 0;
  unsigned long long start = 0;
  if (rest == nullptr ||
      sscanf(rest + 1,
             " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %llu",
             &state, &threads, &start) != 3) {
    return ProcessStat{};
  }
  // A zombie that still has threads is a process of which only the main thread has ended.
  if (state == 'X' || (state == 'Z' && threads <= 1)) return ProcessStat{};
  return ProcessStat{start, state == 'T' || state == 't'};
}

std::optional<uint64_t> startTimeOf(int32_t pid) {
  const auto stat = statOf(pid);
  return stat ? std::optional(stat->startTime) : std::nullopt;
}

}  // namespace smddp::transport::shm
