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

constexpr Nanoseconds kMillisecond = 1'000'000;
constexpr Nanoseconds kSlice = 50 * kMillisecond;  // between looks at signals

std::string textOf(int error) { return std::generic_category().message(error); }

void pause(Nanoseconds duration) {
  ::poll(nullptr, 0, static_cast<int>(duration / kMillisecond));
  checkInterrupt();
}

}  // namespace

Client::Client(const std::string& host, uint16_t port, Nanoseconds timeout)
    : host_(host), port_(port), timeout_(timeout) {
  const Deadline deadline = Deadline::after(clock_, timeout);
  for (Nanoseconds wait = 2 * kMillisecond; !socket_; wait = std::min(2 * wait, kSlice)) {
    socket_ = connectOnce(deadline);
    if (socket_) break;
    if (deadline.passed(clock_)) {
      raise(ErrorKind::Timeout,
            "nobody serves the store at {}:{} ({}): has rank 0 been started, and is this its "
            "address?",
            host_, port_, textOf(errno));
    }
    pause(wait);
  }
  configure(socket_);
}

FileDescriptor Client::connectOnce(const Deadline& deadline) {
  const Addresses addresses = resolve(host_, port_);
  int failure = ECONNREFUSED;
  for (const addrinfo* one = addresses.get(); one; one = one->ai_next) {
    FileDescriptor socket(::socket(one->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket) raiseErrno(ErrorKind::Resource, "no descriptor left for the store");
    if (::connect(socket.get(), one->ai_addr, one->ai_addrlen) != 0) {
      failure = errno;
      if (failure != EINPROGRESS) continue;
      await(socket, POLLOUT, deadline);
      socklen_t size = sizeof failure;
      (void)::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &failure, &size);
      if (failure != 0) continue;
    }
    return socket;
  }
  errno = failure;
  return {};
}

void Client::await(const FileDescriptor& socket, short events, const Deadline& deadline) {
  while (true) {
    pollfd polled{socket.get(), events, 0};
    const Nanoseconds left = std::clamp<Nanoseconds>(deadline.at - clock_.now(), 0, kSlice);
    const int ready = ::poll(&polled, 1, static_cast<int>(left / kMillisecond));
    checkInterrupt();
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) raiseErrno(ErrorKind::Transport, "poll of the store");
    if (deadline.passed(clock_)) {
      raise(ErrorKind::Timeout, "the store at {}:{} does not answer", host_, port_);
    }
  }
}

void Client::raiseLost(const std::string& why) const {
  raise(ErrorKind::PeerLost,
        "the store at {}:{} does not answer ({}): rank 0, which serves it, has ended or is cut off",
        host_, port_, why);
}

Bytes Client::ask(const Request& request) {
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
      await(socket_, POLLOUT, deadline);
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
      await(socket_, POLLIN, deadline);
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
