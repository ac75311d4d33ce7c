// Watches the host of a peer, and its process, while this process waits for the peer.
//
// The peer's kernel acknowledges what is sent on the lifeline, and its process answers with an echo. But where packets
// were lost, TCP tries again after pauses that double: when a link has been down for two seconds, a connection may stay
// silent for two more. So if the lifeline is silent, the host is also asked by new connections to the lifeline's port,
// one in each period. The kernel answers them, whatever its processes do. They are reset at once and carry nothing.
//
// An answer shows that both directions work: the host acknowledges what we have sent, or continues what our
// acknowledgements allow. So two hosts, one of which no longer hears the other, give each other up at about the same
// time. Any TCP connection between the two hosts counts, also of other processes (the kernel lists them): a link whose
// queues hold the data of seconds is slow, not broken.
//
// Threads: those of the lifeline. Errors: none; what cannot be asked, for want of descriptors, does not count as
// silence.
#pragma once

#include <cstdint>
#include <vector>

#include "bootstrap/lifeline_wire.h"
#include "common/clock.h"
#include "common/file_descriptor.h"

namespace smddp::bootstrap {

// For how long a peer has been silent, beyond the time that its answers take on this network.
struct Silence {
  Nanoseconds host = 0;
  Nanoseconds process = 0;  // while its host has acknowledged probes
};

class HostWatch {
 public:
  // Between two looks.
  static constexpr Nanoseconds kPeriod = 100'000'000;

  // Call it repeatedly while waiting for the peer: looks for answers, and asks again, once per period. `lifeline` is
  // the connection to the peer, `host` the address of its lifeline.
  void look(const FileDescriptor& lifeline, Endpoint& host, Nanoseconds now);
  // The process has answered.
  void onEcho() { processSilence_ = 0; }
  Silence silence() const;
  // True if the host was looked at in the last `gap`, and has not been silent for that long.
  bool isInContact(Nanoseconds now, Nanoseconds gap) const {
    return lookedAt_ > 0 && now - lookedAt_ < gap && hostSilence_ < gap;
  }
  // Called in a forked child.
  void close() noexcept {
    for (Attempt& attempt : attempts_) attempt.socket = FileDescriptor();
  }

 private:
  struct Attempt {
    FileDescriptor socket;
    Nanoseconds since;
  };

  bool hasAnswered(const FileDescriptor& lifeline, const Endpoint& host, Nanoseconds since);
  bool isAnyAttemptAnswered(Nanoseconds now);
  bool attempt(Endpoint& host, Nanoseconds now);

  Nanoseconds lookedAt_ = 0;
  Nanoseconds hostSilence_ = 0;
  // Grows only while the host acknowledges probes: else the echo may be on its way.
  Nanoseconds processSilence_ = 0;
  Nanoseconds patience_ = 0;  // how long an answer may take
  uint64_t moved_ = 0;        // on the lifeline
  uint64_t movedInAll_ = 0;   // on all connections to the host
  bool couldAsk_ = true;
  std::vector<Attempt> attempts_;  // oldest first
};

}  // namespace smddp::bootstrap
