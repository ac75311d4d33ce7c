#include "bootstrap/host_watch.h"

#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <linux/sock_diag.h>
#include <linux/tcp.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

namespace smddp::bootstrap {
namespace {

// After so long without a look nothing is known of the time between.
constexpr Nanoseconds kPause = 10 * HostWatch::kPeriod;
// After so long an attempt is given up, which bounds the descriptors: one attempt is made per period. Where answers
// take longer, those of the lifeline come all the same.
constexpr Nanoseconds kAttemptLife = 5 * HostWatch::kPeriod;

// TCP_ESTABLISHED, which <linux/tcp.h> lacks.
constexpr unsigned kEstablished = 1;

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

// The bytes of an address, as the kernel compares them.
std::span<const std::byte> addressOf(const Endpoint& host) {
  if (host.storage.ss_family == AF_INET) {
    return std::as_bytes(
        std::span(&reinterpret_cast<const sockaddr_in&>(host.storage).sin_addr, 1));
  }
  return std::as_bytes(
      std::span(&reinterpret_cast<const sockaddr_in6&>(host.storage).sin6_addr, 1));
}

// Counts the bytes that a connection has moved; 0 if it does not lead to `host`. `message` comes from the kernel.
uint64_t movedOn(const nlmsghdr& message, const Endpoint& host) {
  if (message.nlmsg_len < NLMSG_LENGTH(sizeof(inet_diag_msg))) return 0;
  const auto* socket = static_cast<const inet_diag_msg*>(NLMSG_DATA(&message));
  const auto address = addressOf(host);
  if (std::memcmp(socket->id.idiag_dst, address.data(), address.size()) != 0) return 0;
  auto left = static_cast<int>(message.nlmsg_len - NLMSG_LENGTH(sizeof *socket));
  const auto* attribute = reinterpret_cast<const rtattr*>(socket + 1);
  for (; RTA_OK(attribute, left); attribute = RTA_NEXT(attribute, left)) {
    if (attribute->rta_type != INET_DIAG_INFO) continue;
    tcp_info info{};
    std::memcpy(&info, RTA_DATA(attribute), std::min<size_t>(sizeof info, RTA_PAYLOAD(attribute)));
    return movedOn(info);
  }
  return 0;
}

// Returns the bytes that all connections between this host and that one have moved. Those of other processes count,
// because their data may fill a slow link for seconds. 0 if the kernel does not tell.
uint64_t movedBetween(const Endpoint& host) {
  const FileDescriptor socket(::socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (!socket) return 0;
  struct {
    nlmsghdr head{};
    inet_diag_req_v2 request{};
  } ask;
  ask.head.nlmsg_len = sizeof ask;
  ask.head.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  ask.head.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
  ask.request.sdiag_family = static_cast<uint8_t>(host.storage.ss_family);
  ask.request.sdiag_protocol = IPPROTO_TCP;
  ask.request.idiag_ext = 1U << (INET_DIAG_INFO - 1);
  ask.request.idiag_states = 1U << kEstablished;
  if (::send(socket.get(), &ask, sizeof ask, 0) < 0) return 0;
  uint64_t moved = 0;
  alignas(nlmsghdr) std::array<std::byte, 32768> answer;
  // The kernel has the next part ready when the last one is read.
  for (;;) {
    const auto got = ::recv(socket.get(), answer.data(), answer.size(), MSG_DONTWAIT);
    if (got <= 0) return moved;
    auto left = static_cast<unsigned>(got);
    const auto* message = reinterpret_cast<const nlmsghdr*>(answer.data());
    for (; NLMSG_OK(message, left); message = NLMSG_NEXT(message, left)) {
      if (message->nlmsg_type == NLMSG_DONE || message->nlmsg_type == NLMSG_ERROR) return moved;
      moved += movedOn(*message, host);
    }
  }
}

}  // namespace

Silence HostWatch::silence() const {
  const auto beyondPatience = [&](Nanoseconds silence) {
    return std::max<Nanoseconds>(0, silence - patience_);
  };
  return {beyondPatience(hostSilence_), beyondPatience(processSilence_)};
}

void HostWatch::look(const FileDescriptor& lifeline, Endpoint& host, Nanoseconds now) {
  const Nanoseconds since = now - lookedAt_;
  if (since < kPeriod) return;
  lookedAt_ = now;
  const bool isFirst = since > kPause;
  if (isFirst) {
    attempts_.clear();
    processSilence_ = 0;
  }
  const bool isHeard = isAnyAttemptAnswered(now);
  // All sources are looked at: the next look compares with what each says now.
  if (hasAnswered(lifeline, host, isFirst ? 0 : since) || isHeard || isFirst) {
    hostSilence_ = 0;
    attempts_.clear();
  } else if (couldAsk_) {
    hostSilence_ += since;
  }
  // A stopped process reads nothing, so its buffer may be full. Then the lifeline says nothing more of its host.
  (void)::send(lifeline.get(), &kProbe, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  couldAsk_ = hostSilence_ == 0 || attempt(host, now);
}

bool HostWatch::hasAnswered(const FileDescriptor& lifeline, const Endpoint& host,
                            Nanoseconds since) {
  const tcp_info info = infoOf(lifeline.get());
  patience_ = (Nanoseconds{info.tcpi_rtt} + 4 * Nanoseconds{info.tcpi_rttvar}) * 1000;
  const uint64_t moved = movedOn(info);
  if (moved != moved_) {
    moved_ = moved;
    processSilence_ += since;
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
