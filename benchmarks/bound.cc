// What allreduce cannot do without: the rows `bound` of smddp.bench. smddp/bench/bare.py calls these functions.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

// The compiler makes one version of a function for each instruction set, and the loader selects one.
#if defined(__x86_64__)
#define EVERY_CPU __attribute__((target_clones("default", "avx2", "arch=skylake-avx512")))
#else
#define EVERY_CPU
#endif

namespace {

// Bytes of one send or receive, and of those that a peer may be ahead of the sum: they stay in the L2 cache.
// 1 MiB is as fast.
constexpr size_t kPiece = 256 << 10;
// Bytes that are summed at a time, from all peers: they stay in the L1 cache.
constexpr size_t kSumBlock = 16 << 10;
// Fewer bytes are not worth a turn, unless they are the last ones: of the sum, and of a send of what has been summed.
constexpr size_t kLeastSum = 4 << 10;
constexpr size_t kLeastSend = 64 << 10;
constexpr int kLongestPollMs = 50;

// Two buffers: the common case. The compiler vectorises it without help.
EVERY_CPU void sumTwo(float* __restrict a, float* __restrict b, size_t count) {
  for (size_t i = 0; i < count; ++i) a[i] = b[i] = a[i] + b[i];
}

// Sums in blocks that stay in the L1 cache, so that each buffer is read and written once.
EVERY_CPU void sumMany(std::span<float* const> buffers, size_t count) {
  constexpr size_t kBlock = 1024;
  float sums[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    std::copy_n(buffers[0] + begin, n, sums);
    for (float* buffer : buffers.subspan(1)) {
      for (size_t i = 0; i < n; ++i) sums[i] += buffer[begin + i];
    }
    for (float* buffer : buffers) std::copy_n(sums, n, buffer + begin);
  }
}

EVERY_CPU void addTo(float* __restrict sum, const float* __restrict values, size_t count) {
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
  // The peer's values of this rank's shard, until they are summed. The byte at position p lies at p % kPiece.
  std::vector<float> ring = std::vector<float>(kPiece / sizeof(float));
  Bytes shard = {};  // which the peer sums, within the vector of this rank
  size_t sent = 0;
  size_t received = 0;
};

// How a turn of an exchange ended. The values are those of smddp/bench/bare.py.
enum class Turn { Complete = 0, Moved = 1, Still = 2, Lost = 3 };

// Each rank sends every other rank its shard of the vector, sums its own shard as the others' values arrive, and sends
// the sums to all. Sockets and vector belong to the caller.
class Exchange {
 public:
  Exchange(std::span<const int> sockets, size_t rank);
  void begin(float* vector, size_t count);
  // Sends, receives and sums until all is done, but not for much longer than kLongestPollMs; sleeps in poll() when
  // nothing can move. After Turn::Lost, errno says why, or is 0 if the peer has closed the connection.
  Turn run();
  bool isComplete(const Peer& peer) const;
  const std::vector<Peer>& peers() const { return peers_; }
  size_t lost() const { return lost_; }

 private:
  // The next bytes to send to a peer, or the place of the next ones from it; none if it is not their turn.
  Bytes sendable(const Peer& peer) const;
  Bytes receivable(Peer& peer) const;
  // These return whether anything moved.
  bool send(Peer& peer);
  bool receive(Peer& peer);
  bool sum();
  void lose(const Peer& peer, int error);
  void sleepUntilReady();

  size_t rank_;
  // Begins with the next rank, so that the ranks do not all send to the same one first.
  std::vector<Peer> peers_;
  std::vector<pollfd> polled_;

  // Of the current exchange.
  Bytes own_;  // this rank's shard
  size_t summed_ = 0;
  bool isLost_ = false;
  size_t lost_ = 0;  // the rank of the connection that failed
  int error_ = 0;
};

Exchange::Exchange(std::span<const int> sockets, size_t rank) : rank_(rank) {
  for (size_t step = 1; step < sockets.size(); ++step) {
    const size_t other = (rank + step) % sockets.size();
    peers_.push_back({.rank = other, .socket = sockets[other]});
  }
}

void Exchange::begin(float* vector, size_t count) {
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

Turn Exchange::run() {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::milliseconds(kLongestPollMs);
  bool hasMoved = false;
  while (true) {
    bool moved = false;
    for (Peer& peer : peers_) {
      moved |= send(peer);
      moved |= receive(peer);
    }
    moved |= sum();
    if (isLost_) {
      errno = error_;
      return Turn::Lost;
    }
    if (std::ranges::all_of(peers_, [&](const Peer& peer) { return isComplete(peer); })) {
      return Turn::Complete;
    }
    hasMoved |= moved;
    if (Clock::now() > end) return hasMoved ? Turn::Moved : Turn::Still;
    if (!moved) sleepUntilReady();
  }
}

Bytes Exchange::sendable(const Peer& peer) const {
  if (peer.sent < peer.shard.count) {
    return {peer.shard.begin + peer.sent, std::min(kPiece, peer.shard.count - peer.sent)};
  }
  const size_t position = peer.sent - peer.shard.count;
  const size_t ready = summed_ - position;
  if (ready < kLeastSend && summed_ < own_.count) return {};
  return {own_.begin + position, std::min(kPiece, ready)};
}

Bytes Exchange::receivable(Peer& peer) const {
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

bool Exchange::send(Peer& peer) {
  const Bytes bytes = sendable(peer);
  if (bytes.count == 0) return false;
  const ssize_t done = ::send(peer.socket, bytes.begin, bytes.count, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (done < 0) lose(peer, errno);
  if (done <= 0) return false;
  peer.sent += static_cast<size_t>(done);
  return true;
}

bool Exchange::receive(Peer& peer) {
  const Bytes place = receivable(peer);
  if (place.count == 0) return false;
  const ssize_t done = ::recv(peer.socket, place.begin, place.count, MSG_DONTWAIT);
  if (done <= 0) lose(peer, done == 0 ? 0 : errno);
  if (done <= 0) return false;
  peer.received += static_cast<size_t>(done);
  return true;
}

void Exchange::lose(const Peer& peer, int error) {
  if (isLost_ || error == EAGAIN || error == EWOULDBLOCK || error == EINTR) return;
  isLost_ = true;
  lost_ = peer.rank;
  error_ = error;
}

bool Exchange::sum() {
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

bool Exchange::isComplete(const Peer& peer) const {
  const size_t bytes = own_.count + peer.shard.count;  // in each direction
  return peer.sent == bytes && peer.received == bytes;
}

void Exchange::sleepUntilReady() {
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

}  // namespace

extern "C" {

// Each of `number` buffers, at least two, becomes the sum of all.
void bound_sum(float* const* buffers, size_t number, size_t count) {
  if (number == 2) {
    sumTwo(buffers[0], buffers[1], count);
  } else {
    sumMany({buffers, number}, count);
  }
}

// `sockets` has the connected socket of each rank; that of this rank is ignored.
void* bound_exchange_new(const int* sockets, size_t size, size_t rank) {
  return new Exchange({sockets, size}, rank);
}

void bound_exchange_delete(void* exchange) { delete static_cast<Exchange*>(exchange); }

void bound_exchange_begin(void* exchange, float* vector, size_t count) {
  static_cast<Exchange*>(exchange)->begin(vector, count);
}

int bound_exchange_run(void* exchange) {
  return static_cast<int>(static_cast<Exchange*>(exchange)->run());
}

size_t bound_exchange_lost(const void* exchange) {
  return static_cast<const Exchange*>(exchange)->lost();
}

// Whether the exchange with a rank is not complete.
int bound_exchange_lacks(const void* exchange, size_t rank) {
  const auto& it = *static_cast<const Exchange*>(exchange);
  return std::ranges::any_of(
      it.peers(), [&](const Peer& peer) { return peer.rank == rank && !it.isComplete(peer); });
}
}
