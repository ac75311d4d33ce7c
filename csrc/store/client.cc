#include "store/client.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "common/error.h"
#include "common/interrupt.h"
#include "store/sockets.h"

namespace smddp::store {
namespace {

// One attempt to connect: the kernel has sent a SYN three times. A host that comes up later is not sent another for
// long.
constexpr Nanoseconds kAttempt = 5000 * kMillisecond;
// For a rank that gives up, and says so: the store was there before.
constexpr Nanoseconds kReconnect = 1000 * kMillisecond;

std::string textOf(int error) { return std::generic_category().message(error); }

}  // namespace

Client::Client(const std::string& host, uint16_t port, Nanoseconds timeout)
    : host_(host), port_(port), timeout_(timeout) {
  const Deadline deadline = Deadline::after(clock_, timeout);
  for (Nanoseconds wait = 2 * kMillisecond;; wait = std::min(2 * wait, kSlice)) {
    const int failure = connectToAny(deadline);
    if (failure == 0) return;
    if (deadline.passed(clock_)) {
      raise(ErrorKind::Timeout,
            "nobody serves the store at {}:{} ({}): has rank 0 been started, and is this its "
            "address?",
            host_, port_, textOf(failure));
    }
    pause(wait);
  }
}

int Client::connectToAny(const Deadline& deadline) {
  const AddressList addresses = resolve(host_, port_, deadline.at - clock_.now());
  Nanoseconds numLeft = 0;
  for (const addrinfo* one = addresses.get(); one; one = one->ai_next) ++numLeft;
  int failure = ECONNREFUSED;
  for (const addrinfo* one = addresses.get(); one; one = one->ai_next) {
    // An address whose packets vanish leaves time for those that follow.
    const Nanoseconds share = (deadline.at - clock_.now()) / numLeft--;
    std::memcpy(&address_, one->ai_addr, one->ai_addrlen);
    addressSize_ = one->ai_addrlen;
    failure = connect(std::min(share, kAttempt));
    if (failure == 0) break;
  }
  return failure;
}

int Client::connect(Nanoseconds timeout) {
  FileDescriptor socket(
      ::socket(address_.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) {
    // The name service may know addresses of a protocol that this machine does not speak.
    if (errno == EAFNOSUPPORT) return errno;
    raiseErrno(ErrorKind::Resource, "no descriptor left for the store");
  }
  int failure = 0;
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address_), addressSize_) != 0) {
    failure = errno;
    if (failure != EINPROGRESS) return failure;
    if (!isReady(socket, POLLOUT, Deadline::after(clock_, timeout))) return ETIMEDOUT;
    socklen_t size = sizeof failure;
    (void)::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &failure, &size);
    if (failure != 0) return failure;
  }
  configure(socket);
  socket_ = std::move(socket);
  return 0;
}

bool Client::isReady(const FileDescriptor& socket, short events, const Deadline& deadline) const {
  while (true) {
    pollfd polled{socket.get(), events, 0};
    const Nanoseconds left = std::clamp<Nanoseconds>(deadline.at - clock_.now(), 0, kSlice);
    const int ready = ::poll(&polled, 1, static_cast<int>(left / kMillisecond));
    // Not interrupted: what is there is taken, also by a rank that was interrupted and says so.
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) raiseErrno(ErrorKind::Transport, "poll of the store");
    checkInterrupt();
    if (deadline.passed(clock_)) return false;
  }
}

void Client::await(short events, const Deadline& deadline) const {
  if (isReady(socket_, events, deadline)) return;
  raise(ErrorKind::Timeout, "the store at {}:{} does not answer", host_, port_);
}

void Client::raiseLost(const std::string& why) const {
  raise(ErrorKind::PeerLost,
        "the store at {}:{} does not answer ({}): rank 0, which serves it, has ended or is cut off",
        host_, port_, why);
}

Bytes Client::ask(const Request& request) {
  if (!socket_) {
    const int failure = connect(kReconnect);
    if (failure != 0) raiseLost(textOf(failure));
  }
  try {
    return exchange(request);
  } catch (...) {
    // A reply may still come, which the next call must not take for its own.
    socket_ = {};
    throw;
  }
}

Bytes Client::exchange(const Request& request) {
  const Deadline deadline = Deadline::after(clock_, timeout_);
  const Bytes frame = serialise(request);
  for (size_t done = 0; done < frame.size();) {
    const ssize_t sent =
        ::send(socket_.get(), frame.data() + done, frame.size() - done, MSG_NOSIGNAL);
    if (sent >= 0) {
      done += static_cast<size_t>(sent);
    } else if (errno == EAGAIN) {
      await(POLLOUT, deadline);
    } else if (errno != EINTR) {
      raiseLost(textOf(errno));
    }
  }
  Bytes reply(kLengthBytes);
  for (size_t done = 0; done < reply.size();) {
    const ssize_t got = ::recv(socket_.get(), reply.data() + done, reply.size() - done, 0);
    if (got > 0) {
      done += static_cast<size_t>(got);
      if (done != kLengthBytes || reply.size() != kLengthBytes) continue;
      const size_t length = lengthOf(reply);
      if (length == 0 || length > kMaxFrame) raiseLost("it sends what is no reply");
      reply.resize(kLengthBytes + length);
    } else if (got == 0) {
      raiseLost("it has closed the connection");
    } else if (errno == EAGAIN) {
      await(POLLIN, deadline);
    } else if (errno != EINTR) {
      raiseLost(textOf(errno));
    }
  }
  reply.erase(reply.begin(), reply.begin() + kLengthBytes);
  return reply;
}

void Client::set(const std::string& key, const Value& value) {
  ask({RequestKind::Set, {key}, value});
}

int64_t Client::add(const std::string& key, int64_t amount) {
  const auto bytes = std::as_bytes(std::span(&amount, 1));
  const Bytes reply = ask({RequestKind::Add, {key}, {bytes.begin(), bytes.end()}});
  int64_t sum = 0;
  if (reply.size() != 1 + sizeof sum) raiseLost("it sends what is no sum");
  std::memcpy(&sum, reply.data() + 1, sizeof sum);
  return sum;
}

bool Client::containsAll(const std::vector<std::string>& keys) {
  return ask({RequestKind::Check, keys, {}}).front() == std::byte{1};
}

Client::Value Client::get(const std::string& key, Nanoseconds timeout) {
  return std::move(multiGet({key}, timeout).front());
}

std::vector<Client::Value> Client::multiGet(const std::vector<std::string>& keys,
                                            Nanoseconds timeout) {
  const Deadline deadline = Deadline::after(clock_, timeout);
  for (Nanoseconds wait = kMillisecond;; wait = std::min(2 * wait, kSlice)) {
    const Bytes reply = ask({RequestKind::Get, keys, {}});
    if (reply.front() == std::byte{1}) {
      auto values = parseValues(std::span(reply).subspan(1), keys.size());
      if (!values) raiseLost("it sends what are no values");
      return std::move(*values);
    }
    if (deadline.passed(clock_)) {
      raise(ErrorKind::Timeout, "the store has no {} yet", keys.front());
    }
    pause(wait);
  }
}

}  // namespace smddp::store
