// The transport between nodes over TCP sockets of the kernel.
//
// Two processes have one connection, which either of them opens when it has something to send; both directions use it.
// If both open one at the same time, each sends on its own, and both receive on both. A connection begins with a Hello
// that says who has opened it. If this rank does not know that process yet, the connection waits until connect()
// introduces it; TCP holds the sender back meanwhile. When a peer is lost, what has arrived from it is taken in, and
// then all its connections are closed.
//
// Threads, ownership and errors: those of Transport.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/clock.h"
#include "common/file_descriptor.h"
#include "common/redial.h"
#include "common/seal.h"
#include "transport/congestion.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/frames.h"
#include "transport/transport.h"

namespace smddp::transport::tcp {

// Its name in SMDDP_PROVIDER.
inline constexpr const char* kProvider = "sockets";

struct Options {
  std::string host;                  // a numeric address of this machine that peers can reach
  std::string reason = "asked for";  // why this transport was chosen, for describe()
  Seal seal{};                       // proves to peers that this process belongs to the job
  // The limit of connections that have not said who they are, or come from processes that nobody has introduced
  // yet. At most a quarter of the descriptors that this process may have.
  size_t maxStrangers = 1024;
  // How long a peer may be out of reach when this process connects to it.
  Nanoseconds hostTimeout = 4'000'000'000;
  CongestionChooser congestion{"auto"};  // of the connections
};

class TcpTransport final : public Transport {
 public:
  // Throws Usage if it cannot listen at the address.
  explicit TcpTransport(Options options);
  ~TcpTransport() override;

  std::vector<std::byte> address() const override;
  PeerId connect(Bytes address, const std::string& description) override;
  RemoteKey registerMemory(std::span<std::byte> memory) override;
  [[nodiscard]] bool control(PeerId peer, Bytes message) override;
  [[nodiscard]] bool put(PeerId peer, const RemoteSlot& slot, uint32_t immediate, Bytes header,
                         Payload payload, uint64_t token) override;
  void withdraw(std::span<std::byte> memory) override;
  bool isDelivered(PeerId peer) const override;
  size_t poll(Sink& sink) override;
  int waitDescriptor() const override { return epoll_.get(); }
  bool prepareWait() override;
  std::string describe() const override;

 private:
  struct Peer;
  // A connection, and whose it is. Its address is what epoll knows it by.
  struct Link {
    explicit Link(FileDescriptor socket) : connection(std::move(socket)) {}
    Connection connection;
    Peer* peer = nullptr;   // null: it has not said who it is, or is not introduced
    uint64_t sender = 0;    // who has opened it; 0 if this process has, or before the Hello
    bool isQueued = false;  // in busy_
    bool isConnecting = false;
    NetworkPath path;
    uint64_t reviewAt = 0;  // look at the path again when so many bytes have been sent
  };
  struct Peer {
    PeerId number = 0;
    Address address;
    Link* out = nullptr;  // where this process sends
    bool failed = false;
    Redial redial{};
    Deadline nextDial{0};
  };
  class LinkReceiver;

  Peer& peerOf(PeerId peer);
  // The connection on which this process sends to the peer. Null: there is none yet, or it has failed.
  Link* outgoing(Peer& peer);
  void dial(Peer& peer);
  void onDialError(Peer& peer, int error);
  // The kernel has connected the link, or given up. False: it has given up, and the link is gone.
  bool finishDial(Link& link);
  Link& add(FileDescriptor socket);
  // Sets the congestion control that suits the path, as far as it is known.
  void review(Link& link);
  void accept();
  // Makes room: the oldest connection that has not said who it is does so, or is closed. False: all have said it.
  bool dropSilent();
  // False: the link is gone.
  bool greet(Link& link);
  void bind(Link& link, Peer& peer);
  void noteBusy(Link& link);
  size_t serve(Link& link, Sink& sink);
  // Takes in what has arrived on other links of the peer before it is given up.
  size_t receiveRest(const Link& lost, Sink& sink);
  void fail(Peer& peer, const std::string& cause);
  void drop(Link& link);
  void close(Link& link);
  void closeLinksOf(PeerId peer);
  void listen(bool on);
  uint64_t proofOf(uint64_t sender, uint64_t receiver) const;

  const Options options_;
  const uint64_t id_;
  const size_t maxStrangers_;
  const MonotonicClock clock_;
  FileDescriptor epoll_, listener_;
  uint16_t port_ = 0;
  std::vector<std::span<std::byte>> regions_;  // by key - 1
  std::vector<std::unique_ptr<Peer>> peers_;   // by number
  std::unordered_map<uint64_t, Peer*> peerById_;
  std::list<Link> links_;
  std::vector<Link*> busy_;  // with something to do that epoll will not tell again
  std::vector<std::pair<PeerId, std::string>> failures_;  // not yet reported
  std::vector<uint64_t> done_;
  size_t numStrangers_ = 0;  // links without a peer
  bool hasWarnedOfStrangers_ = false;
  bool hasWarnedOfDescriptors_ = false;
  // While the process has no descriptor for a connection that waits, its listener is not watched: epoll would report it
  // again and again.
  bool isListening_ = true;
  Deadline listenAgain_;
};

}  // namespace smddp::transport::tcp
