#include "store/server.h"

#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <vector>

#include "common/error.h"
#include "common/log.h"
#include "store/sockets.h"

namespace smddp::store {
namespace {

constexpr int kBacklog = 1024;
constexpr size_t kChunk = size_t{1} << 16;

FileDescriptor listenAt(const addrinfo& address) {
  FileDescriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int yes = 1;
  if (!socket || ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      ::bind(socket.get(), address.ai_addr, address.ai_addrlen) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    return {};
  }
  return socket;
}

uint16_t portOf(const FileDescriptor& socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    raiseErrno(ErrorKind::Transport, "the store's own address");
  }
  return ntohs(storage.ss_family == AF_INET
                   ? reinterpret_cast<const sockaddr_in&>(storage).sin_port
                   : reinterpret_cast<const sockaddr_in6&>(storage).sin6_port);
}

}  // namespace

Server::Server(const std::string& host, uint16_t port, Nanoseconds timeout)
    : stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!stop_) raiseErrno(ErrorKind::Resource, "no descriptor left for the store");
  const auto addresses = resolve(host, port, timeout);
  for (const addrinfo* one = addresses.get(); one && !listener_; one = one->ai_next) {
    listener_ = listenAt(*one);
    if (!listener_ && errno == EADDRINUSE) break;
  }
  if (!listener_ && errno == EADDRNOTAVAIL) {
    const auto everywhere = everyInterface(port);
    for (const addrinfo* one = everywhere.list.get(); one && !listener_; one = one->ai_next) {
      listener_ = listenAt(*one);
    }
  }
  if (!listener_) {
    raiseErrno(ErrorKind::Transport,
               "rank 0 cannot serve the store at {}:{}, where the other ranks look for it", host,
               port);
  }
  port_ = portOf(listener_);
  // Signals are for the program's own threads.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    raise(ErrorKind::Resource, "no thread for the store: {}", error.what());
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Server::~Server() {
  const uint64_t one = 1;
  while (::write(stop_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
  thread_.join();
}

void Server::linger(int clients, Nanoseconds limit) const {
  const MonotonicClock clock;
  const Deadline deadline = Deadline::after(clock, limit);
  while ((numCame_ < clients || numConnected_ > 0) && !deadline.passed(clock)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Server::run() {
  while (true) {
    std::vector<pollfd> polled{{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const auto& [fd, connection] : connections_) {
      // A client that does not read its replies gets no further ones.
      polled.push_back({fd, static_cast<short>(connection.toSend.empty() ? POLLIN : POLLOUT), 0});
    }
    if (::poll(polled.data(), polled.size(), -1) < 0) {
      if (errno == EINTR) continue;
      SMDDP_LOG(Warn, "store", "the store ends: {}", std::strerror(errno));
      return;
    }
    if (polled[0].revents != 0) return;
    for (size_t i = 2; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      const auto found = connections_.find(polled[i].fd);
      bool isAlive = true;
      try {
        isAlive = receive(found->second) && send(found->second);
      } catch (const std::exception& error) {
        SMDDP_LOG(Warn, "store", "a client of the store is disconnected: {}", error.what());
        isAlive = false;
      }
      if (!isAlive) connections_.erase(found);
    }
    if (polled[1].revents != 0) accept();
    numConnected_ = connections_.size();
  }
}

void Server::accept() {
  while (true) {
    FileDescriptor socket(
        ::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE) {
        SMDDP_LOG(Warn, "store", "no descriptor left for a client of the store; raise ulimit -n");
        // The connection stays in the kernel's queue. Without a pause poll() returns at once.
        ::poll(nullptr, 0, 100);
      }
      return;
    }
    configure(socket);
    const int fd = socket.get();
    connections_[fd].socket = std::move(socket);
    numConnected_ = connections_.size();
    ++numCame_;
  }
}

bool Server::receive(Connection& connection) {
  if (!connection.toSend.empty()) return true;
  Bytes& received = connection.received;
  const size_t before = received.size();
  received.resize(before + kChunk);
  const ssize_t got = ::recv(connection.socket.get(), received.data() + before, kChunk, 0);
  received.resize(before + static_cast<size_t>(std::max<ssize_t>(got, 0)));
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return false;
  while (received.size() >= kLengthBytes) {
    const size_t length = lengthOf(received);
    if (length > kMaxFrame) return false;
    if (received.size() < kLengthBytes + length) break;
    const auto request = parseRequest(std::span(received).subspan(kLengthBytes, length));
    if (!request) return false;
    const Bytes reply = answer(*request);
    connection.toSend.insert(connection.toSend.end(), reply.begin(), reply.end());
    received.erase(received.begin(),
                   received.begin() + static_cast<ptrdiff_t>(kLengthBytes + length));
  }
  return true;
}

bool Server::send(Connection& connection) {
  Bytes& left = connection.toSend;
  while (!left.empty()) {
    const ssize_t sent =
        ::send(connection.socket.get(), left.data(), left.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    left.erase(left.begin(), left.begin() + sent);
  }
  return true;
}

Bytes Server::answer(const Request& request) {
  const auto isSet = [this](const std::string& key) {
    return values_.contains(key) || sums_.contains(key);
  };
  switch (request.kind) {
    case RequestKind::Set: values_[request.keys.front()] = request.value; return replyWith(true);
    case RequestKind::Add: {
      int64_t amount = 0;
      std::memcpy(&amount, request.value.data(), sizeof amount);
      // Unsigned, because a client may send amounts whose sum overflows.
      auto& sum = sums_[request.keys.front()];
      sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(amount));
      return replyWith(true, std::as_bytes(std::span(&sum, 1)));
    }
    case RequestKind::Get: {
      bootstrap::BlobWriter rest;
      size_t bytes = 0;
      for (const std::string& key : request.keys) {
        const auto found = values_.find(key);
        if (found == values_.end()) return replyWith(false);
        // Before they are copied: a stranger may name one large value many times.
        bytes += sizeof(uint32_t) + found->second.size();
        if (bytes > kMaxFrame) {
          raise(ErrorKind::Usage, "it asks for more than {} bytes at a time", kMaxFrame);
        }
        appendValue(rest, found->second);
      }
      return replyWith(true, rest.take());
    }
    case RequestKind::Check: return replyWith(std::ranges::all_of(request.keys, isSet));
  }
  return replyWith(false);
}

}  // namespace smddp::store
