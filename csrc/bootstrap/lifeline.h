// Lifelines: idle TCP connections between processes on different nodes. If a connection ends, the other process is
// dead.
//
// When a process dies, the kernel closes its sockets, and the peer's poll() sees that at once. If a host vanishes, a
// process that waits for it and calls probe() gives it up after Options::hostTimeout (host_watch.h says how it is
// asked); otherwise the kernel's keep-alive probes find it, after ten seconds or more. A process that leaves in order
// sends a goodbye first.
//
// There is one connection per pair: the process with the smaller id connects. Both sides send a hello with both ids.
// So a process is accepted only if it has read our address in the store (and has the job token, if there is one), and
// a stale port that now belongs to another program is recognised. A connection without a hello is half open. It is
// dropped without an answer after 3 s. At most 64 are half open at a time; others wait in the kernel's queue. A peer
// that was dropped because it did not get to run within these 3 s connects again. A connection that is closed before it
// has sent anything, as those of a host watch, does not leave the kernel (TCP_DEFER_ACCEPT).
//
// Threads: none of its own; all calls come from one thread (except closeInChild). Nothing blocks. Owns its sockets.
// If it is destroyed without leave(), the peers take that for a death. Errors: the constructor and connect() throw;
// later failures are Departures, not exceptions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/host_watch.h"
#include "bootstrap/lifeline_wire.h"
#include "bootstrap/process_id.h"
#include "common/clock.h"
#include "common/file_descriptor.h"
#include "common/redial.h"

namespace smddp::bootstrap {

class Lifeline {
 public:
  struct Options {
    // The time limit for the hello of an accepted connection.
    Nanoseconds handshakeTimeout = 3'000'000'000;
    // The time limit for the connection to an introduced peer.
    Nanoseconds connectTimeout = 30'000'000'000;
    size_t maxHalfOpen = 64;
    // A host that answers no probe for this long is down or cut off.
    Nanoseconds hostTimeout = 4'000'000'000;
    Seal seal{};
  };
  // The end of a peer; reported once per peer.
  struct Departure {
    ProcessId process;
    bool orderly;     // it sent a goodbye
    bool wasReached;  // it was connected before
    // It has died. Else, and if not orderly, it may be alive: cut off from this host, or given up.
    bool isDead;
    std::string cause;
  };

  // Listens on an ephemeral port of `localAddress` (numeric; local_address.h).
  Lifeline(const ProcessId& self, const std::string& localAddress, const Options& options);
  Lifeline(const ProcessId& self, const std::string& localAddress)
      : Lifeline(self, localAddress, Options()) {}
  ~Lifeline();
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

  // Our address, for Introduction::lifeline.
  std::vector<std::byte> address() const;

  // Introduces a peer. Returns at once; if the peer cannot be reached, poll() reports a Departure. Does nothing for a
  // known peer. Throws Transport, naming `description`, if the address is malformed.
  void connect(std::span<const std::byte> address, const std::string& description);

  // The number of peers that are connected and whose hello has arrived.
  size_t numConnected() const;
  // Whether the peer was introduced, and is neither connected nor departed.
  bool isExpected(const ProcessId& process) const;

  // Makes sure that the peer's host is still reached: if it is silent for too long, the peer departs. Call it
  // repeatedly while waiting for the peer. True when it has been given up just now.
  bool probe(const ProcessId& process);
  // Lets a peer depart whose host is silent, and tells it so, if it can hear that.
  void giveUp(const ProcessId& process, const std::string& cause);
  // As the last probes have found it.
  Silence silenceOf(const ProcessId& process) const;

  // Serves all connections and reports departures. The callback may call any method except poll(). Returns the number
  // of departures.
  size_t poll(const std::function<void(const Departure&)>& onDeparture);

  // An epoll descriptor that is readable when poll() has something to do, deadlines included.
  int descriptor() const { return epoll_.get(); }

  // Sends a goodbye to every peer and closes all sockets. Afterwards poll() does nothing.
  void leave();

  // Called in a forked child: closes the child's copies of the sockets, which would keep the connections alive after
  // the parent's death. Calls close(2) only. During the fork no thread may be inside another call.
  void closeInChild() noexcept;

 private:
  enum class State {
    Connecting,     // we connect
    AwaitingHello,  // connected, but the peer's hello has not arrived
    AwaitingIntroduction,  // accepted, with a hello, but our connect() was not called yet; not in the epoll set
    Connected,
  };
  struct Connection {
    FileDescriptor socket;
    State state;
    bool accepted;     // the peer connected to us
    ProcessId peer{};  // if accepted: set when its hello has arrived
    Deadline deadline{};
    std::vector<std::byte> received{};  // the bytes of its hello so far
    // If we connected: from then on the peer may have dropped the connection because our hello was late.
    Deadline mayBeDropped{};
    HostWatch watch{};
  };
  struct Peer {
    std::string description;
    Endpoint endpoint;
    Deadline deadline;
    Redial redial{};
    Deadline nextDial = Deadline::never();
    enum { Expected, Connected, Departed } state = Expected;
  };
  using ConnectionId = uint64_t;
  using Connections = std::map<ConnectionId, Connection>;

  void listen(const std::string& localAddress);
  void dial(const ProcessId& process);
  void onDialError(const ProcessId& process, int error);
  void accept();
  void serve(Connections::iterator it);
  void onWritable(Connections::iterator it);
  void onHello(Connections::iterator it);
  void onLaterBytes(Connections::iterator it);
  void admit(Connections::iterator it);
  void confirm(Connections::iterator it);
  void fail(Connections::iterator it, const std::string& cause, bool isDead = false);
  void failHandshake(Connections::iterator it, const std::string& cause);
  void depart(const ProcessId& process, bool orderly, const std::string& cause,
              bool isDead = false);
  void drop(Connections::iterator it);
  Connections::iterator find(const ProcessId& process);
  Connections::const_iterator find(const ProcessId& process) const;
  size_t numHalfOpen() const;
  void expire();
  void pauseListening(bool pause);
  void rearm();

  const ProcessId self_;
  const Options options_;
  const MonotonicClock clock_;
  FileDescriptor epoll_;
  FileDescriptor timer_;  // makes epoll_ readable when a deadline passes
  FileDescriptor listener_;
  Endpoint endpoint_;
  bool paused_ = false;          // the listener has no events in the epoll set
  Deadline resumeListening_{0};  // when to accept again after the machine ran out of descriptors
  ConnectionId nextId_ = 2;      // 0 and 1 are the listener and the timer
  Connections connections_;
  std::map<ProcessId, ConnectionId> byPeer_;  // once the process at the other end is known
  std::map<ProcessId, Peer> peers_;
  std::vector<Departure> departures_;  // not yet reported
};

}  // namespace smddp::bootstrap
