// Control messages on their way to the Sink: in order per sender, and never before the sender is known.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "transport/transport.h"

namespace smddp::transport::fabric {

// Keeps what arrived too early: ahead of a message that is still under way, or ahead of our connect().
//
// Bounded: a sender that goes beyond what anybody may have under way is reported once as broken.
class Inbox {
 public:
  static constexpr size_t kMaxUnknownSenders = 1024;
  static constexpr size_t kMaxFromUnknown = 256;
  static constexpr size_t kMaxOutOfOrder = 4096;

  // From now on the sender is `peer`; what it sent before is delivered by deliverIntroduced().
  void introduce(uint64_t sender, PeerId peer);

  // Delivers the message and all that waited for it, or keeps it.
  void arrived(uint64_t sender, uint64_t sequence, Bytes message, Sink& sink);
  void deliverIntroduced(Sink& sink);
  bool hasIntroduced() const { return !introduced_.empty(); }

  // Peers that sent more than is kept, each once.
  std::vector<PeerId> takeOverflowed();

 private:
  struct Sender {
    PeerId peer = -1;
    uint64_t next = 0;  // sequence number that is delivered next
    bool overflowed = false;
    std::map<uint64_t, std::vector<std::byte>> early;
  };
  void deliverReady(Sender& sender, Sink& sink);

  std::unordered_map<uint64_t, Sender> senders_;
  std::vector<uint64_t> introduced_;
  std::vector<PeerId> overflowed_;
  size_t unknownSenders_ = 0;
};

}  // namespace smddp::transport::fabric
