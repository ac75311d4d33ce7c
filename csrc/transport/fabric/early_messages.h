// Delivers control messages to the Sink in order per sender, and not before the sender is known.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "transport/transport.h"

namespace smddp::transport::fabric {

// Owns messages that arrived too early: before an earlier message of the same sender, or before our connect().
//
// It is bounded. A sender with more early messages than a correct one can have is reported once. Used by the thread
// that owns the engine.
class EarlyMessages {
 public:
  static constexpr size_t kMaxUnknownSenders = 1024;
  static constexpr size_t kMaxFromUnknown = 256;
  static constexpr size_t kMaxOutOfOrder = 4096;

  // Says that the sender is `peer`. deliverIntroduced() delivers its earlier messages.
  void introduce(uint64_t sender, PeerId peer);

  // Delivers the message, and those that waited for it, or keeps it.
  void arrived(uint64_t sender, uint64_t sequence, Bytes message, Sink& sink);
  void deliverIntroduced(Sink& sink);
  bool hasIntroduced() const { return !introduced_.empty(); }

  // Peers that sent more messages than are kept. Each is returned once.
  std::vector<PeerId> takeOverflowed();

 private:
  struct Sender {
    PeerId peer = -1;
    uint64_t next = 0;  // the sequence number of the next message to deliver
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
