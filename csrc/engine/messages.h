// The messages of one group that are in flight: a Matcher and what it needs of its group.
//
// Messages have no place in the order of operations, so any break of the group ends all of them. Used by the thread
// that owns the engine.
#pragma once

#include "engine/channels.h"
#include "engine/continuation_queue.h"
#include "engine/matcher.h"
#include "engine/membership.h"
#include "engine/standstill.h"

namespace smddp::engine {

class Messages final : public Watched, private Matcher::Host {
 public:
  // What is referred to outlives this.
  Messages(Process& process, const Membership& membership, Channels& channels,
           ContinuationQueue& continuations);

  // Throws what ends the group.
  void submit(Message message, CompletionPtr completion);
  // See Matcher.
  bool withdraw(const Completion& receive) { return matcher_.withdraw(receive); }
  // Throws Transport when the message is not understood.
  void onControl(Rank from, transport::Bytes message);
  bool idle() const { return matcher_.idle(); }
  // Appends the completions of the sends that have not ended.
  void appendOpenSends(std::vector<CompletionPtr>& open);

  // Watched.
  std::vector<Standstill> standstills() override;
  std::optional<Standstill> standstillOf(const Completion& completion) override;
  void endFrom(const Break& broken) override;
  std::optional<uint64_t> oldest() const override { return std::nullopt; }
  bool advance() override { return matcher_.advance(); }

 private:
  Standstill standstillOf(const Exchange& exchange) const;

  // Matcher::Host.
  void sendControl(Rank peer, transport::Bytes message) override {
    channels_.control(peer, message);
  }
  transport::SendChannel& sendChannel(Rank peer) override { return channels_.messageSender(peer); }
  transport::ReceiveChannel& receiveChannel(Rank peer) override {
    return channels_.messageReceiver(peer);
  }
  void finish(Exchange& exchange) override {
    continuations_.finish(*exchange.completion, std::nullopt);
  }
  bool backlogged(Rank peer) override { return channels_.hasBacklog(peer); }

  Process& process_;
  const Membership& membership_;
  Channels& channels_;
  ContinuationQueue& continuations_;
  Matcher matcher_;
};

}  // namespace smddp::engine
