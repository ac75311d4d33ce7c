#include "bootstrap/host_watch.h"

#include <linux/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

namespace smddp::bootstrap {
namespace {

// After so long without a look nothing is known of the time between.
constexpr Nanoseconds kPause = 10 * HostWatch::kPeriod;
// After so long an attempt is given up, which bounds the descriptors: one attempt is made per period. Where answers take
// longer, those of the lifeline come all the same.
constexpr Nanoseconds kAttemptLife = 5 * HostWatch::kPeriod;

// Fields that the kernel does not know are 0.
tcp_info infoOf(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  return info;
}

// Packets that were acknowledged and bytes that arrived in order. What the other side merely repeats does not count.
uint64_t movedOn(const tcp_info& info) {
  return uint64_t{info.tcpi_delivered} + info.tcpi_bytes_received;
}

bool isSameHost(const sockaddr_storage& a, const sockaddr_storage& b) {
  if (a.ss_family != b.ss_family) return false;
  if (a.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(a).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(b).sin_addr.s_addr;
  }
  return a.ss_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6&>(a).sin6_addr,
                     &reinterpret_cast<const sockaddr_in6&>(b).sin6_addr, sizeof(in6_addr)) == 0;
}

// On all connections of this process to the host: those that libfabric has are not accessible in another way.
uint64_t movedBetween(const Endpoint& host) {
  uint64_t moved = 0;
  std::error_code unreadable;
  const std::filesystem::directory_iterator open("/proc/self/fd", unreadable);
  if (unreadable) return 0;
  for (auto at = begin(open); at != end(open); at.increment(unreadable)) {
    if (unreadable) break;
    const std::string name = at->path().filename();
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
    if (isSameHost(peer, host.storage)) moved += movedOn(infoOf(fd));
  }
  return moved;
}

}  // namespace

Silence HostWatch::silence() const {
  const auto beyondPatience = [&](Nanoseconds silence) {
    return std::max<Nanoseconds>(0, silence - patience_);
  };
  Silence result{.host = beyondPatience(hostSilence_)};
  if (askedAt_ && isAcknowledged_) result.process = beyondPatience(lookedAt_ - *askedAt_);
  return result;
}

void HostWatch::look(const FileDescriptor& lifeline, Endpoint& host, Nanoseconds now) {
  const Nanoseconds since = now - lookedAt_;
  if (since < kPeriod) return;
  lookedAt_ = now;
  const bool isFirst = since > kPause;
  if (isFirst) {
    attempts_.clear();
    askedAt_.reset();
  }
  const bool isHeard = isAnyAttemptAnswered(now);
  // All sources are looked at: the next look compares with what each says now.
  if (hasAnswered(lifeline, host) || isHeard || isFirst) {
    hostSilence_ = 0;
    attempts_.clear();
  } else if (couldAsk_) {
    hostSilence_ += since;
  }
  if (!askedAt_) {
    askedAt_ = now;
    isAcknowledged_ = false;
  }
  // A stopped process reads nothing, so its buffer may be full. Then the lifeline says nothing more of its host.
  (void)::send(lifeline.get(), &kProbe, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  couldAsk_ = hostSilence_ == 0 || attempt(host, now);
}

bool HostWatch::hasAnswered(const FileDescriptor& lifeline, const Endpoint& host) {
  const tcp_info info = infoOf(lifeline.get());
  patience_ = (Nanoseconds{info.tcpi_rtt} + 4 * Nanoseconds{info.tcpi_rttvar}) * 1000;
  const uint64_t moved = movedOn(info);
  if (moved != moved_) {
    moved_ = moved;
    isAcknowledged_ = true;
    movedInAll_ = 0;
    return true;
  }
  const uint64_t before = std::exchange(movedInAll_, movedBetween(host));
  return before != 0 && movedInAll_ > before;
}

bool HostWatch::isAnyAttemptAnswered(Nanoseconds now) {
  bool answered = false;
  std::erase_if(attempts_, [&](const Attempt& attempt) {
    pollfd ready{attempt.socket.get(), POLLOUT, 0};
    if (::poll(&ready, 1, 0) == 0) return now - attempt.since > kAttemptLife;
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(attempt.socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    // A host that refuses is there. Other errors come from this host, or from one between.
    answered |= error == 0 || error == ECONNREFUSED || error == ECONNRESET;
    return true;
  });
  return answered;
}

// False if this process has no descriptor or memory for it.
bool HostWatch::attempt(Endpoint& host, Nanoseconds now) {
  FileDescriptor socket(
      ::socket(host.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return false;
  // The end of the attempt resets the connection, which leaves nothing behind on either side.
  const linger none{1, 0};
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
  if (::connect(socket.get(), host.address(), host.size()) == 0 || errno == EINPROGRESS) {
    attempts_.push_back({std::move(socket), now});
  }
  return true;
}

}  // namespace smddp::bootstrap
