#include "store/sockets.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "common/error.h"
#include "common/interrupt.h"
#include "common/log.h"

namespace smddp::store {

namespace {

constexpr Nanoseconds kUnknown = 10'000 * kMillisecond;  // for a name that nobody knows yet
constexpr Nanoseconds kLookUpEvery = 500 * kMillisecond;

}  // namespace

AddressList resolve(const std::string& host, uint16_t port, Nanoseconds timeout) {
  const MonotonicClock clock;
  const Nanoseconds began = clock.now();
  for (bool isFirst = true;; isFirst = false) {
    FoundAddresses found = lookUpHost(host, port);
    if (found.list) return std::move(found.list);
    const int failure = found.failure;
    const Nanoseconds limit = failure == EAI_AGAIN ? timeout
                              : failure == EAI_NONAME || failure == EAI_NODATA
                                  ? std::min(timeout, kUnknown)
                                  : 0;
    const Nanoseconds left = limit - (clock.now() - began);
    if (left <= 0) {
      raise(ErrorKind::Usage,
            "there is no address of host \"{}\", where rank 0 serves the store: {}", host,
            found.why());
    }
    if (isFirst) {
      SMDDP_LOG(Warn, "store", "there is no address of host \"{}\" yet ({}); waiting for it", host,
                found.why());
    }
    pause(std::min(left, kLookUpEvery));
  }
}

void pause(Nanoseconds duration) {
  for (; duration > 0; duration -= kSlice) {
    const Nanoseconds slice = std::min(duration, kSlice);
    std::this_thread::sleep_for(std::chrono::nanoseconds(slice));
    checkInterrupt();
  }
}

void configure(const FileDescriptor& socket) {
  const auto set = [&](int level, int name, int value) {
    (void)::setsockopt(socket.get(), level, name, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 6);
}

}  // namespace smddp::store
