// TCP connections between processes on different nodes that carry nothing and whose end says that
// the other died.
//
// A process that dies closes its sockets, whatever killed it: the peer's poll() sees it at once. A
// host that vanishes is noticed by keep-alive probes in two to three seconds. A process that leaves
// in order says goodbye first.
//
// One connection per pair: the process with the smaller id connects. Both sides say hello with both
// ids, so that only somebody who has read our address in the store gets past the door, and a stale
// port that now belongs to another program is found out. Strangers are dropped without an answer,
// after 3 s at the latest; at most 64 of them are let in at a time, the others wait in the kernel's
// queue.
//
// Threads: none of its own; all calls from one thread (closeInChild excepted). Nothing blocks. Owns
// its sockets. Destroying it without leave() looks to the peers like a death. Errors: the
// constructor and connect() throw; afterwards trouble is a Departure, never an exception.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

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
  enum class State { Connecting, AwaitingHello, Connected };
  struct Connection {
    FileDescriptor socket;
    State state;
    bool accepted;  // they connected to us
    bool known;     // `peer` is set: we connected, or they said who they are
    ProcessId peer;
    Deadline deadline;
    std::vector<std::byte> received;  // of their hello
  };
  // A process that connect() introduced.
  struct Peer {
    std::string description;
    Deadline deadline;  // for its connection, while it has none
    bool connected = false;
    bool departed = false;
  };
  using ConnectionId = uint64_t;

  void listen(const std::string& localAddress);
  void acceptAll();
  void serve(ConnectionId id);
  bool finishConnecting(Connection& connection, std::string* cause);
  bool readHello(Connection& connection, std::string* cause);
  bool readGoodbye(Connection& connection, bool* orderly, std::string* cause);
  bool sendHello(Connection& connection, std::string* cause);
  bool admit(ConnectionId id, std::string* cause);
  void setConnected(Connection& connection);
  void end(ConnectionId id, bool orderly, const std::string& cause);
  void depart(const ProcessId& process, bool orderly, const std::string& cause);
  void expire();
  void watch(ConnectionId id, int fd, uint32_t events, bool isNew);
  void rearm();
  size_t numHalfOpen() const;

  const ProcessId self_;
  const Options options_;
  const MonotonicClock clock_;
  FileDescriptor epoll_;
  FileDescriptor timer_;  // makes epoll_ readable when a deadline passes
  FileDescriptor listener_;
  std::vector<std::byte> address_;
  bool listening_ = false;  // the listener is being watched
  ConnectionId nextId_ = 2;
  std::map<ConnectionId, Connection> connections_;
  std::map<ProcessId, Peer> peers_;
  std::vector<Departure> departures_;  // found, not yet said
};

}  // namespace smddp::bootstrap
