#include "bootstrap/lifeline.h"

#include <linux/tcp.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "common/epoll.h"
#include "common/error.h"
#include "common/log.h"

namespace smddp::bootstrap {
namespace {

constexpr uint64_t kListenerId = 0;
constexpr uint64_t kTimerId = 1;
constexpr Nanoseconds kSecond = 1'000'000'000;

std::string textOf(int error) { return std::generic_category().message(error); }

// Sends all bytes; false otherwise. A fresh socket has room for a hello, so a partial send is a failure, too.
bool sendAll(const FileDescriptor& socket, std::span<const std::byte> bytes) {
  const auto sent = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  return sent == static_cast<ssize_t>(bytes.size());
}

// Lets the kernel detect a vanished host for which nobody waits. It sends a keep-alive probe after 2 s of silence and
// then every 2 s, and ends the connection after 10 s without an answer. A shorter limit could end the connection to a
// kernel that is short of time or socket memory and drops a probe or two. After an interruption shorter than
// `hostTimeout` the kernel may send again only when twice that time is over.
void enableKeepAlive(const FileDescriptor& socket, Nanoseconds hostTimeout) {
  const auto limit = std::max<int64_t>(10'000, 3 * hostTimeout / 1'000'000);
  const auto option = [&](int level, int name, int value) {
    if (::setsockopt(socket.get(), level, name, &value, sizeof(value)) != 0) {
      SMDDP_LOG(Debug, "bootstrap", "socket option {}/{}: {}", level, name, textOf(errno));
    }
  };
  option(SOL_SOCKET, SO_KEEPALIVE, 1);
  option(IPPROTO_TCP, TCP_KEEPIDLE, 2);
  option(IPPROTO_TCP, TCP_KEEPINTVL, 2);
  option(IPPROTO_TCP, TCP_KEEPCNT, 5);
  option(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(limit));
}

}  // namespace

Lifeline::Lifeline(const ProcessId& self, const std::string& localAddress, const Options& options)
    : self_(self),
      options_(options),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  if (!epoll_ || !timer_) {
    raiseErrno(ErrorKind::Resource, "no descriptors left for lifelines; raise ulimit -n");
  }
  setEpoll(epoll_, EPOLL_CTL_ADD, timer_.get(), EPOLLIN, {.u64 = kTimerId});
  listen(localAddress);
}

Lifeline::~Lifeline() = default;

void Lifeline::listen(const std::string& localAddress) {
  endpoint_ = parseNumericAddress(localAddress);
  const int family = endpoint_.storage.ss_family;
  listener_ = FileDescriptor(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  socklen_t size = sizeof(endpoint_.storage);
  if (!listener_ && (errno == EMFILE || errno == ENFILE)) {
    raiseErrno(ErrorKind::Resource, "no descriptor left to listen on {}; raise ulimit -n",
               localAddress);
  }
  if (!listener_ || ::bind(listener_.get(), endpoint_.address(), endpoint_.size()) != 0 ||
      ::listen(listener_.get(), SOMAXCONN) != 0 ||
      ::getsockname(listener_.get(), endpoint_.address(), &size) != 0) {
    raiseErrno(ErrorKind::Transport, "cannot listen on {}", localAddress);
  }
  // Connections without a hello stay in the kernel for a second, and those that end by then are never seen here. Else
  // they would fill the queue of a process that is stopped. Without the option accept() drops them.
  const int second = 1;
  (void)::setsockopt(listener_.get(), IPPROTO_TCP, TCP_DEFER_ACCEPT, &second, sizeof second);
  setEpoll(epoll_, EPOLL_CTL_ADD, listener_.get(), EPOLLIN, {.u64 = kListenerId});
}

std::vector<std::byte> Lifeline::address() const { return serialise({endpoint_, self_}); }

void Lifeline::connect(std::span<const std::byte> address, const std::string& description) {
  SMDDP_CHECK(static_cast<bool>(listener_), "connect() to {} after leave()", description);
  const LifelineAddress peer = parseLifelineAddress(address, description);
  if (peer.process == self_) return;
  const Deadline deadline = Deadline::after(clock_, options_.connectTimeout);
  if (!peers_.try_emplace(peer.process, Peer{description, peer.endpoint, deadline}).second) {
    return;
  }
  if (self_ < peer.process) {
    dial(peer.process);
  } else if (const auto early = find(peer.process); early != connections_.end()) {
    setEpoll(epoll_, EPOLL_CTL_ADD, early->second.socket.get(), EPOLLIN, {.u64 = early->first});
    admit(early);
  }
  rearm();
}

void Lifeline::dial(const ProcessId& process) {
  Peer& peer = peers_.at(process);
  peer.nextDial = Deadline::never();
  Endpoint& endpoint = peer.endpoint;
  const int family = endpoint.storage.ss_family;
  FileDescriptor socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket ||
      (::connect(socket.get(), endpoint.address(), endpoint.size()) != 0 && errno != EINPROGRESS)) {
    return onDialError(process, errno);
  }
  const ConnectionId id = nextId_++;
  setEpoll(epoll_, EPOLL_CTL_ADD, socket.get(), EPOLLOUT, {.u64 = id});
  // The connection has no deadline of its own; the peer's applies.
  Connection connection{std::move(socket), State::Connecting, false, process};
  connection.mayBeDropped = Deadline::after(clock_, options_.handshakeTimeout / 2);
  connections_.emplace(id, std::move(connection));
  byPeer_[process] = id;
}

void Lifeline::onDialError(const ProcessId& process, int error) {
  Peer& peer = peers_.at(process);
  if (const auto next = peer.redial.after(error, clock_, options_.hostTimeout)) {
    peer.nextDial = *next;
    return;
  }
  const bool ours = error == EMFILE || error == ENFILE;
  depart(process, false,
         fmt::format("cannot connect: {}{}", textOf(error), ours ? "; raise ulimit -n" : ""));
}

size_t Lifeline::poll(const std::function<void(const Departure&)>& onDeparture) {
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), 0);
  if (count <= 0 && departures_.empty()) return 0;
  for (int i = 0; i < count; ++i) {
    const uint64_t id = events[i].data.u64;
    // An earlier event of this batch may have ended this connection.
    const auto it = connections_.find(id);
    if (id == kListenerId) {
      accept();
    } else if (it != connections_.end()) {
      serve(it);
    }
  }
  expire();
  pauseListening(numHalfOpen() >= options_.maxHalfOpen || !resumeListening_.passed(clock_));
  const std::vector<Departure> found = std::exchange(departures_, {});
  rearm();
  // Report last, when the state is consistent: the callback may introduce peers or leave.
  for (const auto& departure : found) onDeparture(departure);
  return found.size();
}

void Lifeline::accept() {
  // Accept a bounded number at a time, so that many connections cannot keep us here.
  for (size_t i = 0; i < options_.maxHalfOpen && numHalfOpen() < options_.maxHalfOpen; ++i) {
    FileDescriptor socket(
        ::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        // Do not try again at once, which would fail again. The connection waits in the kernel's queue.
        SMDDP_LOG(Warn, "bootstrap", "cannot accept a connection: {}; raise ulimit -n",
                  textOf(errno));
        resumeListening_ = Deadline::after(clock_, kSecond);
      }
      // The queue is empty, or the connection is gone. If there are more, the next poll() finds them.
      return;
    }
    const ConnectionId id = nextId_++;
    setEpoll(epoll_, EPOLL_CTL_ADD, socket.get(), EPOLLIN, {.u64 = id});
    const auto deadline = Deadline::after(clock_, options_.handshakeTimeout);
    const auto [it, isNew] = connections_.emplace(
        id, Connection{std::move(socket), State::AwaitingHello, true, {}, deadline});
    // Usually the hello has arrived already; then the connection is never half open.
    serve(it);
  }
}

void Lifeline::serve(Connections::iterator it) {
  switch (it->second.state) {
    case State::Connecting: return onWritable(it);
    case State::AwaitingHello: return onHello(it);
    case State::AwaitingIntroduction: return;
    case State::Connected: return onLaterBytes(it);
  }
}

void Lifeline::onWritable(Connections::iterator it) {
  Connection& connection = it->second;
  int error = 0;
  socklen_t size = sizeof(error);
  if (::getsockopt(connection.socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0)
    error = errno;
  if (error != 0) {
    const ProcessId process = connection.peer;
    drop(it);
    return onDialError(process, error);
  }
  if (!sendAll(connection.socket, serialise(signedHello(self_, connection.peer, options_.seal)))) {
    return failHandshake(it, "cannot send the hello: " + textOf(errno));
  }
  connection.state = State::AwaitingHello;
  setEpoll(epoll_, EPOLL_CTL_MOD, connection.socket.get(), EPOLLIN, {.u64 = it->first});
}

void Lifeline::onHello(Connections::iterator it) {
  Connection& connection = it->second;
  // Read no byte after the hello: onLaterBytes() reads those.
  std::array<std::byte, kHelloBytes> buffer;
  const size_t missing = kHelloBytes - connection.received.size();
  const auto got = ::recv(connection.socket.get(), buffer.data(), missing, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) {
    return failHandshake(it, got == 0 ? "it hung up before its hello" : textOf(errno));
  }
  connection.received.insert(connection.received.end(), buffer.begin(), buffer.begin() + got);
  if (connection.received.size() < kHelloBytes) return;

  const auto hello = parseHello(connection.received);
  if (!hello || hello->to != self_) return fail(it, "its port belongs to another program");
  if (!isGenuine(*hello, options_.seal)) return fail(it, "it does not have our SMDDP_JOB_TOKEN");
  if (!connection.accepted) {
    if (hello->from != connection.peer) return fail(it, "its port belongs to another process");
    return confirm(it);
  }
  // There is one connection per pair, made by the smaller id. Drop any other.
  if (!(hello->from < self_) || find(hello->from) != connections_.end()) return drop(it);
  connection.peer = hello->from;
  byPeer_[connection.peer] = it->first;
  connection.deadline = Deadline::never();
  if (peers_.contains(connection.peer)) return admit(it);
  // The peer was introduced to us later than we to it. Keep the connection until connect() names the peer.
  connection.state = State::AwaitingIntroduction;
  setEpoll(epoll_, EPOLL_CTL_DEL, connection.socket.get(), 0, {});
}

void Lifeline::admit(Connections::iterator it) {
  if (peers_.at(it->second.peer).state != Peer::Expected) return drop(it);
  if (!sendAll(it->second.socket, serialise(signedHello(self_, it->second.peer, options_.seal)))) {
    return fail(it, "cannot send the hello: " + textOf(errno));
  }
  confirm(it);
}

void Lifeline::confirm(Connections::iterator it) {
  Peer& peer = peers_.at(it->second.peer);
  it->second.state = State::Connected;
  peer.state = Peer::Connected;
  enableKeepAlive(it->second.socket, options_.hostTimeout);
  SMDDP_LOG(Debug, "bootstrap", "lifeline to {}", peer.description);
}

void Lifeline::onLaterBytes(Connections::iterator it) {
  std::array<std::byte, 64> bytes;
  const auto got = ::recv(it->second.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got < 0) {
    // A process that gives this one up says so before it closes its end, but a reset overtakes that. It can do so only
    // after a silence.
    const bool isDead =
        errno == ECONNRESET && it->second.watch.isInContact(clock_.now(), options_.hostTimeout / 4);
    return fail(it, "its connection broke: " + textOf(errno), isDead);
  }
  if (got == 0) return fail(it, "its process ended", /*isDead=*/true);
  const std::span<const std::byte> heard(bytes.data(), static_cast<size_t>(got));
  const auto other = std::find_if(heard.begin(), heard.end(),
                                  [](std::byte byte) { return byte != kProbe && byte != kEcho; });
  if (std::find(heard.begin(), other, kEcho) != other) it->second.watch.onEcho();
  if (other == heard.end()) {
    // One echo answers all probes before it. If it finds no room, the peer has others to read.
    if (std::find(heard.begin(), heard.end(), kProbe) != heard.end()) {
      sendAll(it->second.socket, std::span(&kEcho, 1));
    }
    return;
  }
  if (*other == kGivenUp) {
    return fail(it, "it had no answer from the other host, and gave it up");
  }
  if (*other != kGoodbye) return fail(it, "it sent bytes that no lifeline carries");
  depart(it->second.peer, true, "it left the group");
  drop(it);
}

bool Lifeline::probe(const ProcessId& process) {
  const auto it = find(process);
  if (it == connections_.end() || it->second.state != State::Connected) return false;
  HostWatch& watch = it->second.watch;
  watch.look(it->second.socket, peers_.at(process).endpoint, clock_.now());
  const Nanoseconds silent = watch.silence().host;
  if (silent < options_.hostTimeout) return false;
  giveUp(process, fmt::format("its host has not answered for {:.1f} s: it is down or cut off",
                              static_cast<double>(silent) * 1e-9));
  return true;
}

void Lifeline::giveUp(const ProcessId& process, const std::string& cause) {
  const auto it = find(process);
  if (it == connections_.end() || it->second.state != State::Connected) return;
  sendAll(it->second.socket, std::span(&kGivenUp, 1));
  fail(it, cause);
  rearm();
}

Silence Lifeline::silenceOf(const ProcessId& process) const {
  const auto it = find(process);
  return it != connections_.end() ? it->second.watch.silence() : Silence{};
}

void Lifeline::fail(Connections::iterator it, const std::string& cause, bool isDead) {
  const ProcessId process = it->second.peer;
  drop(it);
  // Without a hello the peer is all zeros, and belongs to no entry.
  if (peers_.contains(process)) depart(process, false, cause, isDead);
}

// Handles a connection that failed before the peer's hello. If our hello may have been late, because this process did
// not run for a while, the peer has dropped us: connect again, until the peer's deadline.
void Lifeline::failHandshake(Connections::iterator it, const std::string& cause) {
  const Connection& connection = it->second;
  if (connection.accepted || !connection.mayBeDropped.passed(clock_)) return fail(it, cause);
  const ProcessId process = connection.peer;
  drop(it);
  dial(process);
}

void Lifeline::depart(const ProcessId& process, bool orderly, const std::string& cause,
                      bool isDead) {
  Peer& peer = peers_.at(process);
  if (peer.state == Peer::Departed) return;
  const bool wasReached = peer.state == Peer::Connected;
  peer.state = Peer::Departed;
  departures_.push_back({process, orderly, wasReached, isDead && wasReached, cause});
  SMDDP_LOG(Debug, "bootstrap", "no lifeline to {} any more: {}", peer.description, cause);
}

void Lifeline::drop(Connections::iterator it) {
  endConnection(epoll_, it->second.socket.get());
  byPeer_.erase(it->second.peer);
  connections_.erase(it);
}

Lifeline::Connections::iterator Lifeline::find(const ProcessId& process) {
  const auto found = byPeer_.find(process);
  return found != byPeer_.end() ? connections_.find(found->second) : connections_.end();
}

Lifeline::Connections::const_iterator Lifeline::find(const ProcessId& process) const {
  const auto found = byPeer_.find(process);
  return found != byPeer_.end() ? connections_.find(found->second) : connections_.end();
}

size_t Lifeline::numHalfOpen() const {
  return std::count_if(connections_.begin(), connections_.end(), [](const auto& entry) {
    return entry.second.accepted && entry.second.state == State::AwaitingHello;
  });
}

size_t Lifeline::numConnected() const {
  return std::count_if(peers_.begin(), peers_.end(),
                       [](const auto& entry) { return entry.second.state == Peer::Connected; });
}

bool Lifeline::isExpected(const ProcessId& process) const {
  const auto found = peers_.find(process);
  return found != peers_.end() && found->second.state == Peer::Expected;
}

void Lifeline::expire() {
  for (auto it = connections_.begin(); it != connections_.end();) {
    const auto current = it++;
    if (current->second.deadline.passed(clock_)) drop(current);
  }
  for (auto& [process, peer] : peers_) {
    if (peer.state != Peer::Expected) continue;
    if (peer.nextDial.passed(clock_)) dial(process);
    if (!peer.deadline.passed(clock_)) continue;
    const auto it = find(process);
    const bool ours = self_ < process;
    if (it != connections_.end()) drop(it);
    depart(process, false,
           fmt::format("{} within {:.1f} s; does a firewall block the ports between the nodes?",
                       ours ? "it could not be reached" : "it did not connect",
                       static_cast<double>(options_.connectTimeout) * 1e-9));
  }
}

void Lifeline::leave() {
  for (auto& [id, connection] : connections_) {
    if (connection.state == State::Connecting || connection.peer == ProcessId{}) continue;
    // The peer expects a hello first.
    if (connection.state == State::AwaitingIntroduction) {
      sendAll(connection.socket, serialise(signedHello(self_, connection.peer, options_.seal)));
    }
    sendAll(connection.socket, std::span(&kGoodbye, 1));
    // With unread bytes the close would send a reset, which may overtake the goodbye.
    std::array<std::byte, kHelloBytes + 1> unread;
    (void)::recv(connection.socket.get(), unread.data(), unread.size(), MSG_DONTWAIT);
  }
  while (!connections_.empty()) drop(connections_.begin());
  listener_ = FileDescriptor();
  peers_.clear();
  departures_.clear();
  rearm();
}

void Lifeline::closeInChild() noexcept {
  for (auto& [id, connection] : connections_) {
    connection.socket = FileDescriptor();
    connection.watch.close();
  }
  for (FileDescriptor* fd : {&listener_, &timer_, &epoll_}) *fd = FileDescriptor();
}

void Lifeline::pauseListening(bool pause) {
  if (pause == paused_ || !listener_) return;
  setEpoll(epoll_, EPOLL_CTL_MOD, listener_.get(), pause ? 0U : EPOLLIN, {.u64 = kListenerId});
  paused_ = pause;
}

void Lifeline::rearm() {
  Nanoseconds earliest = departures_.empty() ? Deadline::never().at : 1;
  if (!resumeListening_.passed(clock_)) earliest = std::min(earliest, resumeListening_.at);
  for (const auto& [id, connection] : connections_) {
    earliest = std::min(earliest, connection.deadline.at);
  }
  for (const auto& [process, peer] : peers_) {
    if (peer.state != Peer::Expected) continue;
    earliest = std::min({earliest, peer.deadline.at, peer.nextDial.at});
  }
  itimerspec when{};
  if (earliest != Deadline::never().at) {
    when.it_value.tv_sec = earliest / kSecond;
    when.it_value.tv_nsec = earliest % kSecond;
  }
  // A new setting also makes the timer unreadable until it fires.
  if (::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr) != 0) {
    raiseErrno(ErrorKind::Resource, "cannot set the lifelines' timer");
  }
}

}  // namespace smddp::bootstrap
