// A Sink that records all events, and a pattern of bytes to send.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace smddp::transport::testing {

// Records everything that is reported.
class RecordingSink : public Sink {
 public:
  void onControl(PeerId from, Bytes message) override {
    controls.emplace_back(from, std::vector<std::byte>(message.begin(), message.end()));
  }
  void onPut(uint32_t immediate) override { ++puts[immediate]; }
  std::span<std::byte> placeFor(PeerId, uint32_t, size_t payloadBytes) override {
    return payloadBytes == posted.size() ? posted : std::span<std::byte>();
  }
  void onPutDone(uint64_t token) override {
    ++done[token];
    if (whenDone) whenDone(token);
  }
  void onPeerFailed(PeerId peer, const std::string& cause) override { failed[peer] = cause; }

  std::span<std::byte> posted;  // where payloads of its length arrive
  std::vector<std::pair<PeerId, std::vector<std::byte>>> controls;
  std::map<uint32_t, int> puts;
  std::map<uint64_t, int> done;
  std::map<PeerId, std::string> failed;
  std::function<void(uint64_t)> whenDone;
};

// Bytes that differ with seed and position, so that a misplaced byte shows.
inline std::vector<std::byte> pattern(size_t size, uint32_t seed) {
  std::vector<std::byte> bytes(size);
  uint32_t state = seed * 2654435761u + 12345u;
  for (std::byte& b : bytes) {
    state = state * 1664525u + 1013904223u;
    b = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

}  // namespace smddp::transport::testing
