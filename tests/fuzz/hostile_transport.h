// A transport whose other end is the input of a fuzzer: it drops what is sent, and reports what the fuzzer says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace smddp::fuzz {

class HostileTransport final : public transport::Transport {
 public:
  std::vector<std::byte> address() const override { return {std::byte{1}}; }
  transport::PeerId connect(transport::Bytes, const std::string&) override { return numPeers_++; }
  transport::RemoteKey registerMemory(std::span<std::byte> memory) override {
    windows_.push_back(memory);
    return {0, windows_.size()};
  }
  bool control(transport::PeerId, transport::Bytes) override { return !isFull_; }
  bool put(transport::PeerId, const transport::RemoteSlot&, uint32_t, transport::Bytes,
           transport::Payload, uint64_t token) override {
    if (!isFull_) done_.push_back(token);
    return !isFull_;
  }
  size_t poll(transport::Sink& sink) override {
    const auto done = std::exchange(done_, {});
    for (const uint64_t token : done) sink.onPutDone(token);
    if (next_) std::exchange(next_, nullptr)(sink);
    return done.size();
  }
  std::string describe() const override { return "fuzzer"; }

  // Sets what the next poll() reports.
  void deliver(std::function<void(transport::Sink&)> event) { next_ = std::move(event); }
  // Whether there is no room for what is sent.
  void setFull(bool isFull) { isFull_ = isFull; }
  // The memory that was registered: a peer may write anything into it.
  const std::vector<std::span<std::byte>>& windows() const { return windows_; }
  // Peers have the numbers below this one.
  transport::PeerId numPeers() const { return numPeers_; }

 private:
  transport::PeerId numPeers_ = 0;
  bool isFull_ = false;
  std::vector<std::span<std::byte>> windows_;
  std::vector<uint64_t> done_;
  std::function<void(transport::Sink&)> next_;
};

}  // namespace smddp::fuzz
