// TCP connections between processes on different nodes that carry nothing and whose end says that
// the other died.
//
// A process that dies closes its sockets, whatever killed it: the peer's poll() sees it at once. A
// host that vanishes is noticed by keep-alive probes in about ten seconds, and in less than two by
// who waits for it (probe()). A process that leaves in order says goodbye first.
//
// One connection per pair: the process with the smaller id connects. Both sides say hello with both
// ids, so that only somebody who has read our address in the store gets past the door (and has the
// job token, if there is one), and a stale port that now belongs to another program is found out.
// Strangers are dropped without an answer, after 3 s at the latest; at most 64 of them are let in at
// a time, the others wait in the kernel's queue. A peer that was dropped because nobody let it run in
// these 3 s connects again.
//
// Threads: none of its own; all calls from one thread (closeInChild excepted). Nothing blocks. Owns
// its sockets. Destroying it without leave() looks to the peers like a death. Errors: the
// constructor and connect() throw; afterwards trouble is a Departure, never an exception.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/lifeline_wire.h"
#include "bootstrap/process_id.h"
#include "common/clock.h"
#include "common/file_descriptor.h"

namespace smddp::bootstrap {

class Lifeline {
 public:
  struct Options {
    // Until a stranger has said hello.
    Nanoseconds handshakeTimeout = 3'000'000'000;
    // Until an introduced peer is connected.
    Nanoseconds connectTimeout = 30'000'000'000;
    size_t maxHalfOpen = 64;
    // What was sent and is not acknowledged for so long says that the host is gone or cut off.
    Nanoseconds hostTimeout = 1'500'000'000;
    Seal seal{};
  };
  // Said once per peer.
  struct Departure {
    ProcessId process;
    bool orderly;  // it said goodbye
    std::string cause;
  };

  // Listens on an ephemeral port of `localAddress` (numeric; local_address.h).
  Lifeline(const ProcessId& self, const std::string& localAddress, const Options& options);
  Lifeline(const ProcessId& self, const std::string& localAddress)
      : Lifeline(self, localAddress, Options()) {}
  ~Lifeline();
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

  // For Introduction::lifeline.
  std::vector<std::byte> address() const;

  // Introduces a peer. Returns at once; a peer that cannot be reached departs. Known peers are left
  // alone. Throws Transport when the address is malformed, naming `description`.
  void connect(std::span<const std::byte> address, const std::string& description);

  // Peers that are connected and whose hello has been heard.
  size_t numConnected() const;
  // Peers that are still to come: introduced, neither connected nor departed.
  size_t numExpected() const;

  // Sends a byte that the peer's kernel acknowledges, whether or not its process runs, unless one
  // was sent a moment ago. poll() takes a peer for departed when acknowledgements fail to come.
  // Call it again and again while the peer is waited for.
  void probe(const ProcessId& process);

  // Looks at all connections and says who departed. The callback may call us back, poll() excepted.
  // Returns the number of departures.
  size_t poll(const std::function<void(const Departure&)>& onDeparture);

  // An epoll descriptor that is readable when poll() has something to do, deadlines included.
  int descriptor() const { return epoll_.get(); }

  // Says goodbye to every peer and closes all sockets; poll() finds nothing any more.
  void leave();

  // In a forked child: closes the child's copies, which would otherwise keep the connections alive
  // after the parent's death. Only calls close(2). The caller makes sure that nobody was inside
  // another call while forking.
  void closeInChild() noexcept;

 private:
  enum class State {
    Connecting,            // ours, under way
    AwaitingHello,         // ours: the peer has not introduced us to itself yet; theirs: a stranger
    AwaitingIntroduction,  // theirs, hello heard; our connect() has not been called yet. Not watched
    Connected,
  };
  struct Connection {
    FileDescriptor socket;
    State state;
    bool accepted;     // they connected to us
    ProcessId peer{};  // of an accepted one: once its hello is heard
    Deadline deadline{};
    std::vector<std::byte> received{};  // of its hello
    // Ours: when the peer may have given us up for a stranger that says nothing.
    Deadline givenUp{};
    Deadline nextProbe{0};
    int silentLooks = 0;
  };
  struct Peer {
    std::string description;
    Endpoint endpoint;
    Deadline deadline;
    enum { Expected, Connected, Departed } state = Expected;
  };
  using ConnectionId = uint64_t;
  using Connections = std::map<ConnectionId, Connection>;

  void listen(const std::string& localAddress);
  void dial(const ProcessId& process, const Endpoint& endpoint);
  void accept();
  void serve(Connections::iterator it);
  void onWritable(Connections::iterator it);
  void onHello(Connections::iterator it);
  void onLaterBytes(Connections::iterator it);
  void admit(Connections::iterator it);
  void confirm(Connections::iterator it);
  void fail(Connections::iterator it, const std::string& cause);
  void failHandshake(Connections::iterator it, const std::string& cause);
  void depart(const ProcessId& process, bool orderly, const std::string& cause);
  void drop(Connections::iterator it);
  bool isSilent(Connection& connection) const;
  Connections::iterator find(const ProcessId& process);
  size_t numHalfOpen() const;
  void expire();
  void watch(ConnectionId id, int fd, int operation, uint32_t events);
  void pauseListening(bool pause);
  void rearm();

  const ProcessId self_;
  const Options options_;
  const MonotonicClock clock_;
  FileDescriptor epoll_;
  FileDescriptor timer_;  // makes epoll_ readable when a deadline passes
  FileDescriptor listener_;
  Endpoint endpoint_;
  bool paused_ = false;          // the listener is not being watched
  Deadline resumeListening_{0};  // not before this, after the machine ran out of descriptors
  ConnectionId nextId_ = 2;      // 0 and 1 are the listener and the timer
  Connections connections_;
  std::map<ProcessId, Peer> peers_;
  std::vector<Departure> departures_;  // found, not yet said
};

}  // namespace smddp::bootstrap
