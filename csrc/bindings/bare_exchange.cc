#include "bindings/bare_exchange.h"

#include <pybind11/stl.h>

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bindings/every_cpu.h"
#include "bindings/float_buffer.h"
#include "common/clock.h"
#include "common/error.h"
#include "common/interrupt.h"

namespace py = pybind11;

namespace smddp::bindings {
namespace {

// Bytes of one send or receive, and of those that a peer may be ahead of the sum: they stay in the L2 cache.
// 1 MiB is as fast.
constexpr size_t kPiece = 256 << 10;
// Bytes that are summed at a time, from all peers: they stay in the L1 cache.
constexpr size_t kSumBlock = 16 << 10;
// Fewer bytes are not worth a turn, unless they are the last ones: of the sum, and of a send of what has been summed.
constexpr size_t kLeastSum = 4 << 10;
constexpr size_t kLeastSend = 64 << 10;

constexpr Nanoseconds kSecond = 1'000'000'000;
constexpr Nanoseconds kInterruptPeriod = kSecond / 20;
constexpr int kLongestPollMs = 50;

SMDDP_EVERY_CPU void addTo(float* __restrict sum, const float* __restrict values, size_t count) {
  for (size_t i = 0; i < count; ++i) sum[i] += values[i];
}

struct Bytes {
  char* begin = nullptr;
  size_t count = 0;
};

// The connection to one rank, and how far the current exchange has come on it. In each direction it carries the
// sender's values of the receiver's shard, then the sums of the sender's shard. There are no headers, because both
// sides know how many bytes these are.
struct Peer {
  size_t rank;
  int socket;
  std::string name;  // for errors
  // The peer's values of this rank's shard, until they are summed. The byte at position p lies at p % kPiece.
  std::vector<float> ring = std::vector<float>(kPiece / sizeof(float));
  Bytes shard = {};  // which the peer sums, within the vector of this rank
  size_t sent = 0;
  size_t received = 0;
};

std::string nameOf(size_t rank, int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  int type = 0;
  socklen_t typeLength = sizeof type;
  if (::getpeername(socket, generic, &length) != 0 ||
      ::getsockopt(socket, SOL_SOCKET, SO_TYPE, &type, &typeLength) != 0 || type != SOCK_STREAM) {
    raise(ErrorKind::Usage, "expects connected stream sockets, but that of rank {} is none", rank);
  }
  std::array<char, NI_MAXHOST> host{};
  // Sockets without a network, such as those of socketpair(), have no such name.
  const bool found =
      ::getnameinfo(generic, length, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) == 0 &&
      address.ss_family != AF_UNIX;
  return found ? fmt::format("rank {} at {}", rank, host.data()) : fmt::format("rank {}", rank);
}

// The least work of an allreduce over TCP: each rank sends every other rank its shard of the vector, sums its own
// shard as the others' values arrive, and sends the sums to all. Sockets and vector belong to the caller.
//
// Runs on the thread that calls it, and sleeps in poll() when nothing can move. After an error the connections hold
// the rest of an exchange, so the object refuses further calls.
class BareExchange {
 public:
  BareExchange(const std::vector<int>& sockets, size_t rank);
  void sumInPlace(const py::buffer& buffer, double timeout);

 private:
  void begin(float* vector, size_t count);
  void run(Nanoseconds timeout);
  // The next bytes to send to a peer, or the place of the next ones from it; none if it is not their turn.
  Bytes sendable(const Peer& peer) const;
  Bytes receivable(Peer& peer) const;
  // These return whether anything moved.
  bool send(Peer& peer) const;
  bool receive(Peer& peer) const;
  bool sum();
  bool isComplete(const Peer& peer) const;
  void sleepUntilReady();
  [[noreturn]] void raiseTimeout(Nanoseconds timeout) const;

  size_t rank_;
  // Begins with the next rank, so that the ranks do not all send to the same one first.
  std::vector<Peer> peers_;
  std::vector<pollfd> polled_;
  bool isUsable_ = true;

  // The state of the current exchange.
  Bytes own_;  // this rank's shard
  size_t summed_ = 0;
};

BareExchange::BareExchange(const std::vector<int>& sockets, size_t rank) : rank_(rank) {
  const size_t size = sockets.size();
  if (size < 2) raise(ErrorKind::Usage, "expects at least two ranks");
  if (rank >= size) raise(ErrorKind::Usage, "expects a rank below {}, not {}", size, rank);
  for (size_t step = 1; step < size; ++step) {
    const size_t other = (rank + step) % size;
    const int socket = sockets[other];
    peers_.push_back({.rank = other, .socket = socket, .name = nameOf(other, socket)});
  }
}

void BareExchange::sumInPlace(const py::buffer& buffer, double timeout) {
  const py::buffer_info info = buffer.request(/*writable=*/true);
  if (!isFloatVector(info)) raise(ErrorKind::Usage, "expects a contiguous buffer of float32");
  if (!(timeout > 0 && timeout <= 1e9)) {
    raise(ErrorKind::Usage, "expects a timeout between 0 and 1e9 seconds, not {}", timeout);
  }
  if (!isUsable_) {
    raise(ErrorKind::Aborted, "an exchange failed before, or runs: its connections cannot be used");
  }
  isUsable_ = false;
  const py::gil_scoped_release release;
  begin(static_cast<float*>(info.ptr), static_cast<size_t>(info.size));
  run(std::llround(timeout * kSecond));
  isUsable_ = true;
}

void BareExchange::begin(float* vector, size_t count) {
  const size_t size = peers_.size() + 1;
  const auto shard = [&](size_t rank) {
    const size_t first = count / size * rank + std::min(rank, count % size);
    const size_t length = count / size + (rank < count % size ? 1 : 0);
    return Bytes{reinterpret_cast<char*>(vector + first), length * sizeof(float)};
  };
  own_ = shard(rank_);
  summed_ = 0;
  for (Peer& peer : peers_) {
    peer.shard = shard(peer.rank);
    peer.sent = peer.received = 0;
  }
}

void BareExchange::run(Nanoseconds timeout) {
  const MonotonicClock clock;
  Nanoseconds checked = clock.now();
  Nanoseconds lastMove = checked;
  while (true) {
    bool moved = false;
    for (Peer& peer : peers_) {
      moved |= send(peer);
      moved |= receive(peer);
    }
    moved |= sum();
    if (std::ranges::all_of(peers_, [&](const Peer& peer) { return isComplete(peer); })) return;
    const Nanoseconds now = clock.now();
    if (moved) {
      lastMove = now;
    } else if (now - lastMove > timeout) {
      raiseTimeout(timeout);
    }
    if (now - checked > kInterruptPeriod) {
      checked = now;
      checkInterrupt();
    }
    if (!moved) sleepUntilReady();
  }
}

Bytes BareExchange::sendable(const Peer& peer) const {
  if (peer.sent < peer.shard.count) {
    return {peer.shard.begin + peer.sent, std::min(kPiece, peer.shard.count - peer.sent)};
  }
  const size_t position = peer.sent - peer.shard.count;
  const size_t ready = summed_ - position;
  if (ready < kLeastSend && summed_ < own_.count) return {};
  return {own_.begin + position, std::min(kPiece, ready)};
}

Bytes BareExchange::receivable(Peer& peer) const {
  if (peer.received < own_.count) {
    const size_t at = peer.received % kPiece;
    const size_t room = summed_ + kPiece - peer.received;
    return {reinterpret_cast<char*>(peer.ring.data()) + at,
            std::min({kPiece - at, room, own_.count - peer.received})};
  }
  // The sums replace values that the peer has summed, so these have left long ago.
  const size_t position = peer.received - own_.count;
  return {peer.shard.begin + position, std::min(kPiece, peer.shard.count - position)};
}

bool BareExchange::send(Peer& peer) const {
  const Bytes bytes = sendable(peer);
  if (bytes.count == 0) return false;
  const ssize_t done = ::send(peer.socket, bytes.begin, bytes.count, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (done >= 0) {
    peer.sent += static_cast<size_t>(done);
    return done > 0;
  }
  if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
    raiseErrno(ErrorKind::PeerLost, "lost {} in an exchange", peer.name);
  }
  return false;
}

bool BareExchange::receive(Peer& peer) const {
  const Bytes place = receivable(peer);
  if (place.count == 0) return false;
  const ssize_t done = ::recv(peer.socket, place.begin, place.count, MSG_DONTWAIT);
  if (done > 0) {
    peer.received += static_cast<size_t>(done);
    return true;
  }
  if (done == 0) {
    raise(ErrorKind::PeerLost, "lost {} in an exchange: it has closed the connection", peer.name);
  }
  if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
    raiseErrno(ErrorKind::PeerLost, "lost {} in an exchange", peer.name);
  }
  return false;
}

bool BareExchange::sum() {
  size_t have = own_.count;
  for (const Peer& peer : peers_) have = std::min(have, peer.received);
  if (have < own_.count && have - summed_ < kLeastSum) return false;
  const size_t before = summed_;
  // TCP may have cut the last float.
  while (have - summed_ >= sizeof(float)) {
    const size_t at = summed_ % kPiece;
    const size_t count = std::min({have - summed_, kSumBlock, kPiece - at}) / sizeof(float);
    auto* sums = reinterpret_cast<float*>(own_.begin + summed_);
    for (const Peer& peer : peers_) addTo(sums, peer.ring.data() + at / sizeof(float), count);
    summed_ += count * sizeof(float);
  }
  return summed_ > before;
}

bool BareExchange::isComplete(const Peer& peer) const {
  const size_t bytes = own_.count + peer.shard.count;  // in each direction
  return peer.sent == bytes && peer.received == bytes;
}

void BareExchange::sleepUntilReady() {
  polled_.clear();
  for (Peer& peer : peers_) {
    const int events =
        (sendable(peer).count > 0 ? POLLOUT : 0) | (receivable(peer).count > 0 ? POLLIN : 0);
    // A peer that is done may have closed its connection, which poll() would report again and again.
    const int socket = events != 0 ? peer.socket : -1;
    polled_.push_back({.fd = socket, .events = static_cast<short>(events), .revents = 0});
  }
  // Errors of a connection are reported by the call that fails next.
  ::poll(polled_.data(), polled_.size(), kLongestPollMs);
}

void BareExchange::raiseTimeout(Nanoseconds timeout) const {
  std::vector<std::string> names;
  for (const Peer& peer : peers_) {
    if (!isComplete(peer)) names.push_back(peer.name);
  }
  raise(ErrorKind::Timeout, "nothing has moved for {:g} s in an exchange with {}",
        static_cast<double>(timeout) / kSecond, fmt::join(names, ", "));
}

}  // namespace

void bindBareExchange(py::module& m) {
  py::class_<BareExchange>(m, "BareExchange")
      .def(py::init<const std::vector<int>&, size_t>(), py::arg("sockets"), py::arg("rank"))
      .def("sum_in_place", &BareExchange::sumInPlace, py::arg("buffer"), py::arg("timeout"));
}

}  // namespace smddp::bindings
