#include "transport/tcp/tcp_transport.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "common/epoll.h"
#include "common/error.h"
#include "common/host_address.h"
#include "common/log.h"
#include "common/random.h"

namespace smddp::transport::tcp {
namespace {

constexpr const char* kTag = "transport/tcp";
constexpr int kEventsPerPoll = 64;
// The read for the head of a shorter payload brings most of it along, and that is copied in any case.
constexpr size_t kLeastPlaced = 4096;
constexpr Nanoseconds kListenAgain = 1'000'000'000;
constexpr uint64_t kReviewBytes = 1 << 20;

// A numeric address for bind() and connect().
class SocketAddress {
 public:
  SocketAddress(const std::string& host, uint16_t port) {
    const FoundAddresses found = parseAddress(host, port);
    if (!found.list) raise(ErrorKind::Transport, "\"{}\" is not an address: {}", host, found.why());
    std::memcpy(&storage_, found.list->ai_addr, found.list->ai_addrlen);
    length_ = found.list->ai_addrlen;
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }
  int family() const { return storage_.ss_family; }

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

FileDescriptor newSocket(int family) {
  FileDescriptor socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) {
    raise(ErrorKind::Resource, "no socket: {}; raise the limit of open files (ulimit -n)",
          std::strerror(errno));
  }
  return socket;
}

// So that strangers leave most descriptors to the program.
size_t strangersWithin(size_t limit) {
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0) return limit;
  return std::clamp<size_t>(files.rlim_cur / 4, 1, limit);
}

}  // namespace

// Gives what arrives on a link to the sink.
class TcpTransport::LinkReceiver final : public Receiver {
 public:
  LinkReceiver(TcpTransport& transport, Peer& peer, Sink& sink)
      : transport_(transport), peer_(peer), sink_(sink) {}
  std::span<std::byte> slotFor(const FrameHeader& frame) override {
    return placeIn(transport_.regions_, frame);
  }
  std::span<std::byte> placeFor(const FrameHeader& frame, size_t payloadBytes) override {
    if (payloadBytes < kLeastPlaced) return {};
    return sink_.placeFor(peer_.number, frame.immediate, payloadBytes);
  }
  void onControlFrame(Bytes message) override {
    ++events;
    sink_.onControl(peer_.number, message);
  }
  void onPutFrame(const FrameHeader& frame) override {
    ++events;
    sink_.onPut(frame.immediate);
  }
  size_t events = 0;

 private:
  TcpTransport& transport_;
  Peer& peer_;
  Sink& sink_;
};

TcpTransport::TcpTransport(Options options)
    : options_(std::move(options)),
      id_(randomNumber()),
      maxStrangers_(strangersWithin(options_.maxStrangers)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) raise(ErrorKind::Resource, "no epoll: {}", std::strerror(errno));
  const SocketAddress address(options_.host, 0);
  listener_ = newSocket(address.family());
  options_.congestion.begin(listener_.get());
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (::bind(listener_.get(), address.get(), address.length()) != 0 ||
      ::listen(listener_.get(), SOMAXCONN) != 0 ||
      ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
    raise(ErrorKind::Usage, "cannot listen at {}: {}; set SMDDP_INTERFACE to another interface",
          options_.host, std::strerror(errno));
  }
  // The port is at the same place in both families.
  port_ = ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
  setEpoll(epoll_, EPOLL_CTL_ADD, listener_.get(), EPOLLIN, {.ptr = nullptr});
}

TcpTransport::~TcpTransport() = default;

std::vector<std::byte> TcpTransport::address() const { return encode({id_, options_.host, port_}); }

PeerId TcpTransport::connect(Bytes bytes, const std::string& description) {
  const Address address = decodeAddress(bytes);
  // Groups share peers, so the peer may be known.
  if (const auto known = peerById_.find(address.id); known != peerById_.end())
    return known->second->number;
  auto peer = std::make_unique<Peer>();
  peer->number = static_cast<PeerId>(peers_.size());
  peer->address = address;
  for (Link& link : links_) {
    if (link.peer == nullptr && link.sender == address.id) bind(link, *peer);
  }
  peerById_.emplace(address.id, peer.get());
  SMDDP_LOG(Debug, kTag, "peer {} is {} at {}:{}", peer->number, description, address.host,
            address.port);
  peers_.push_back(std::move(peer));
  return peers_.back()->number;
}

RemoteKey TcpTransport::registerMemory(std::span<std::byte> memory) {
  const auto isSame = [&](std::span<std::byte> known) {
    return known.data() == memory.data() && known.size() == memory.size();
  };
  const auto known = std::find_if(regions_.begin(), regions_.end(), isSame);
  const auto number = static_cast<uint64_t>(known - regions_.begin()) + 1;
  if (known == regions_.end()) regions_.push_back(memory);
  return {0, number};
}

TcpTransport::Peer& TcpTransport::peerOf(PeerId peer) {
  SMDDP_CHECK(peer >= 0 && static_cast<size_t>(peer) < peers_.size(),
              "peer {} was never introduced", peer);
  return *peers_[static_cast<size_t>(peer)];
}

uint64_t TcpTransport::proofOf(uint64_t sender, uint64_t receiver) const {
  return options_.seal.proof("tcp", sender, receiver);
}

TcpTransport::Link& TcpTransport::add(FileDescriptor socket) {
  // Messages are written as a whole, so there is nothing to wait for.
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  std::list<Link> made;
  Link& link = made.emplace_back(std::move(socket));
  setEpoll(epoll_, EPOLL_CTL_ADD, link.connection.descriptor(),
           EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, {.ptr = &link});
  links_.splice(links_.end(), made);
  return link;
}

void TcpTransport::review(Link& link) {
  options_.congestion.review(link.connection.descriptor(), link.path);
  link.reviewAt = link.connection.bytesSent() + kReviewBytes;
}

TcpTransport::Link* TcpTransport::outgoing(Peer& peer) {
  if (peer.out == nullptr && !peer.failed && peer.nextDial.passed(clock_)) dial(peer);
  return peer.out == nullptr || peer.out->isConnecting ? nullptr : peer.out;
}

void TcpTransport::dial(Peer& peer) {
  const SocketAddress address(peer.address.host, peer.address.port);
  FileDescriptor socket = newSocket(address.family());
  options_.congestion.begin(socket.get());
  if (::connect(socket.get(), address.get(), address.length()) != 0 && errno != EINPROGRESS)
    return onDialError(peer, errno);
  Link& link = add(std::move(socket));
  link.peer = &peer;
  link.isConnecting = true;
  peer.out = &link;
  link.connection.queueHello({kMagic, 0, id_, peer.address.id, proofOf(id_, peer.address.id)});
}

void TcpTransport::onDialError(Peer& peer, int error) {
  if (const auto next = peer.redial.after(error, clock_, options_.hostTimeout)) {
    peer.nextDial = *next;
    return;
  }
  fail(peer, fmt::format("connecting to {}:{} failed: {}", peer.address.host, peer.address.port,
                         std::strerror(error)));
}

bool TcpTransport::finishDial(Link& link) {
  link.isConnecting = false;
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(link.connection.descriptor(), SOL_SOCKET, SO_ERROR, &error, &size) != 0)
    error = errno;
  if (error == 0) {
    review(link);
    return true;
  }
  Peer& peer = *link.peer;
  peer.out = nullptr;
  close(link);
  onDialError(peer, error);
  return false;
}

void TcpTransport::accept() {
  for (;;) {
    FileDescriptor socket(
        ::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      const bool isShort = errno == EMFILE || errno == ENFILE;
      if (isShort && dropSilent()) continue;
      if (isShort && !std::exchange(hasWarnedOfDescriptors_, true)) {
        SMDDP_LOG(
            Warn, kTag,
            "cannot accept connections of other ranks: no descriptor is left; raise the limit "
            "of open files (ulimit -n)");
      }
      if (isShort || errno == ENOBUFS || errno == ENOMEM) listen(false);
      return;
    }
    // If all have said who they are, the new one is closed.
    if (numStrangers_ >= maxStrangers_ && !dropSilent()) continue;
    ++numStrangers_;
    Link& link = add(std::move(socket));
    review(link);
    noteBusy(link);
  }
}

void TcpTransport::listen(bool on) {
  setEpoll(epoll_, EPOLL_CTL_MOD, listener_.get(), on ? EPOLLIN : 0U, {.ptr = nullptr});
  isListening_ = on;
  listenAgain_ = Deadline::after(clock_, kListenAgain);
}

bool TcpTransport::dropSilent() {
  const size_t before = numStrangers_;
  for (auto next = links_.begin(); next != links_.end() && numStrangers_ == before;) {
    Link& link = *next++;
    if (link.peer != nullptr || link.sender != 0) continue;
    // Its Hello may have arrived since it was last read.
    link.connection.markReadable();
    if (greet(link) && link.sender == 0) drop(link);
  }
  return numStrangers_ < before;
}

// Receives the Hello of a link that another process has opened.
bool TcpTransport::greet(Link& link) {
  Hello hello;
  if (!link.connection.receiveHello(hello)) return true;
  const bool isForUs = hello.magic == kMagic && hello.receiver == id_ && hello.sender != 0;
  if (!isForUs || hello.proof != proofOf(hello.sender, id_)) {
    if (isForUs && !std::exchange(hasWarnedOfStrangers_, true)) {
      SMDDP_LOG(Warn, kTag,
                "refused a connection whose opener does not have the job's token "
                "(SMDDP_JOB_TOKEN); another program connects to this rank's port");
    }
    drop(link);
    return false;
  }
  link.sender = hello.sender;
  if (const auto known = peerById_.find(hello.sender); known != peerById_.end())
    bind(link, *known->second);
  return true;
}

void TcpTransport::bind(Link& link, Peer& peer) {
  link.peer = &peer;
  --numStrangers_;
  // serve() closes the link of a peer that has failed.
  if (peer.out == nullptr && !peer.failed) peer.out = &link;
  noteBusy(link);
}

void TcpTransport::noteBusy(Link& link) {
  if (!std::exchange(link.isQueued, true)) busy_.push_back(&link);
}

bool TcpTransport::control(PeerId id, Bytes message) {
  SMDDP_CHECK(message.size() <= kMaxControlBytes, "control message of {} bytes", message.size());
  Link* const link = outgoing(peerOf(id));
  if (link == nullptr || !link->connection.hasRoom()) return false;
  link->connection.queueControl(message);
  noteBusy(*link);
  return true;
}

bool TcpTransport::put(PeerId id, const RemoteSlot& slot, uint32_t immediate, Bytes header,
                       Payload payload, uint64_t token) {
  SMDDP_CHECK(header.size() == kHeaderBytes, "header of {} bytes", header.size());
  SMDDP_CHECK(immediate <= kMaxImmediate, "immediate value {:x}", immediate);
  Link* const link = outgoing(peerOf(id));
  if (link == nullptr || !link->connection.hasRoom()) return false;
  link->connection.queuePut(slot, immediate, header, payload, token);
  noteBusy(*link);
  return true;
}

void TcpTransport::withdraw(std::span<std::byte> memory) {
  for (Link& link : links_) link.connection.withdraw(memory);
}

bool TcpTransport::isDelivered(PeerId peer) const {
  return std::all_of(links_.begin(), links_.end(), [&](const Link& link) {
    return link.peer == nullptr || link.peer->number != peer || link.connection.isDelivered();
  });
}

// Sends and receives what the link's socket takes and has.
size_t TcpTransport::serve(Link& link, Sink& sink) {
  Connection& connection = link.connection;
  size_t events = 0;
  if (link.isConnecting) {
    if (!finishDial(link)) return events;
    // There is room now.
    ++events;
  }
  connection.send(done_);
  if (connection.bytesSent() >= link.reviewAt) review(link);
  for (const uint64_t token : std::exchange(done_, {})) {
    ++events;
    sink.onPutDone(token);
  }
  if (link.peer == nullptr && link.sender == 0 && !greet(link)) return events;
  if (link.peer != nullptr && link.peer->failed) {
    close(link);
    return events;
  }
  if (link.peer != nullptr) {
    LinkReceiver receiver(*this, *link.peer, sink);
    if (connection.receive(receiver)) noteBusy(link);
    events += receiver.events;
    if (connection.isWritable() && connection.hasQueued()) noteBusy(link);
  }
  if (!connection.failure().empty()) {
    if (link.peer != nullptr) {
      events += receiveRest(link, sink);
      fail(*link.peer, connection.failure());
    } else {
      drop(link);
    }
  }
  return events;
}

size_t TcpTransport::receiveRest(const Link& lost, Sink& sink) {
  size_t events = 0;
  for (Link& link : links_) {
    if (&link == &lost || link.peer != lost.peer) continue;
    link.connection.markReadable();
    LinkReceiver receiver(*this, *link.peer, sink);
    while (link.connection.receive(receiver)) continue;
    events += receiver.events;
  }
  return events;
}

size_t TcpTransport::poll(Sink& sink) {
  if (!isListening_ && listenAgain_.passed(clock_)) listen(true);
  std::array<epoll_event, kEventsPerPoll> found;
  const int count = ::epoll_wait(epoll_.get(), found.data(), kEventsPerPoll, 0);
  bool hasCallers = false;
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = found[static_cast<size_t>(i)];
    if (event.data.ptr == nullptr) {
      hasCallers = true;
      continue;
    }
    Link& link = *static_cast<Link*>(event.data.ptr);
    if ((event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) link.connection.markEnding();
    if ((event.events & EPOLLIN) != 0) link.connection.markReadable();
    if ((event.events & EPOLLOUT) != 0) link.connection.markWritable();
    noteBusy(link);
  }
  // Behind the events, because it may close a link that has one.
  if (hasCallers) accept();
  size_t events = 0;
  for (Link* const link : std::exchange(busy_, {})) {
    link->isQueued = false;
    events += serve(*link, sink);
  }
  for (const auto& [peer, cause] : std::exchange(failures_, {})) {
    ++events;
    closeLinksOf(peer);
    sink.onPeerFailed(peer, cause);
  }
  return events;
}

bool TcpTransport::prepareWait() { return busy_.empty() && failures_.empty(); }

void TcpTransport::fail(Peer& peer, const std::string& cause) {
  if (std::exchange(peer.failed, true)) return;
  peer.out = nullptr;
  failures_.emplace_back(peer.number, cause);
}

// Closes a link of nobody that we know.
void TcpTransport::drop(Link& link) {
  --numStrangers_;
  close(link);
}

void TcpTransport::close(Link& link) {
  endConnection(epoll_, link.connection.descriptor());
  std::erase(busy_, &link);
  links_.remove_if([&](const Link& other) { return &other == &link; });
}

// Nobody reads them any more, and the other end shall hear of it.
void TcpTransport::closeLinksOf(PeerId peer) {
  for (auto next = links_.begin(); next != links_.end();) {
    Link& link = *next++;
    if (link.peer != nullptr && link.peer->number == peer) close(link);
  }
}

std::string TcpTransport::describe() const {
  std::map<std::string, int> numbers;
  for (const Link& link : links_) {
    if (!link.isConnecting) ++numbers[congestionControlOf(link.connection.descriptor())];
  }
  std::string now;
  for (const auto& [name, number] : numbers) {
    now += fmt::format("{}{} connection{} with {}", now.empty() ? "; " : ", ", number,
                       number == 1 ? "" : "s", name);
  }
  return fmt::format("TCP sockets, address {} ({}), {}{}", options_.host, options_.reason,
                     options_.congestion.describe(), now);
}

}  // namespace smddp::transport::tcp
