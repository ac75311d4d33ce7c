// The messages of one group that are in flight: a Matcher and what it needs of its group.
//
// Messages have no place in the order of operations, so any break of the group ends all of them. Used by the thread
// that owns the engine.
#pragma once

#include "engine/channels.h"
#include "engine/ended_operations.h"
#include "engine/in_flight.h"
#include "engine/matcher.h"
#include "engine/membership.h"
#include "engine/metrics.h"

namespace smddp::engine {

class Messages final : public Watched, private Matcher::Host {
 public:
  // What is referred to outlives this. `metrics` may be null.
  Messages(Process& process, const Membership& membership, Channels& channels,
           EndedOperations& ended, Metrics::Group* metrics);

  // Ends a message of a group that is broken.
  void refuse(const Message& message, Completion& completion, const Break& broken);
  // Throws what ends the group.
  void submit(Message message, CompletionPtr completion);
  // See Matcher.
  bool withdraw(const Completion& receive);
  // Throws Transport when the message is not understood.
  void onControl(Rank from, transport::Bytes message);
  bool idle() const { return matcher_.idle(); }
  // Appends the completions of the sends that have not ended.
  void appendOpenSends(std::vector<CompletionPtr>& open);

  // Watched.
  std::vector<InFlight> inFlight() override;
  std::optional<InFlight> inFlightOf(const Completion& completion) override;
  void endBroken(const Break& broken) override;
  std::optional<uint64_t> oldest() const override { return std::nullopt; }
  bool advance() override { return matcher_.advance(); }

 private:
  InFlight inFlightOf(const Transfer& transfer) const;
  void count(const Transfer& transfer);

  // Matcher::Host.
  void sendControl(Rank to, transport::Bytes message) override { channels_.control(to, message); }
  transport::SendChannel& sendChannel(Rank to) override { return channels_.messageSender(to); }
  transport::ReceiveChannel& receiveChannel(Rank from) override {
    return channels_.messageReceiver(from);
  }
  void finish(Transfer& transfer) override {
    if (metrics_ != nullptr) count(transfer);
    ended_.finish(*transfer.completion, std::nullopt);
    ended_.release(std::move(transfer.message.keepAlive));
  }
  bool backlogged(Rank to) override { return channels_.hasBacklog(to); }
  Rank jobRank(Rank rank) const override { return membership_.jobRank(rank); }

  Process& process_;
  const Membership& membership_;
  Channels& channels_;
  EndedOperations& ended_;
  Metrics::Group* const metrics_;           // null: nothing is counted; also the next two
  Metrics::Algorithm* const countedSends_;  // …
  Metrics::Algorithm* const countedReceives_;
  Matcher matcher_;
};

}  // namespace smddp::engine
