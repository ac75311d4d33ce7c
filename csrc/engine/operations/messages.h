// The messages of one group that are in flight: a Matcher and what it needs of its group.
//
// Messages have no place in the order of operations, so any break of the group ends all of them. Used by the thread
// that owns the engine.
#pragma once

#include "engine/calls/ended_operations.h"
#include "engine/calls/in_flight.h"
#include "engine/observe/metrics.h"
#include "engine/operations/matcher.h"
#include "engine/plans/channels.h"
#include "engine/team/membership.h"

namespace smddp::engine::operations {

class Messages final : public calls::Watched, private Matcher::Host {
 public:
  // The arguments outlive this object; `metrics` may be null.
  Messages(process::Process& process, const team::Membership& membership, plans::Channels& channels,
           calls::EndedOperations& ended, observe::Metrics::Group* metrics);

  // Ends a message of a group that is broken.
  void refuse(const calls::Message& message, calls::Completion& completion,
              const calls::Break& broken);
  // Throws what ends the group.
  void submit(calls::Message message, calls::CompletionPtr completion);
  // See Matcher.
  bool withdraw(const calls::Completion& receive);
  // Throws Transport when the message is not understood.
  void onControl(Rank from, transport::Bytes message);
  bool idle() const { return matcher_.idle(); }
  // Appends the completions of the sends that have not ended.
  void appendOpenSends(std::vector<calls::CompletionPtr>& open);

  // Watched.
  std::vector<calls::InFlight> inFlight() override;
  std::optional<calls::InFlight> inFlightOf(const calls::Completion& completion) override;
  void endBroken(const calls::Break& broken) override;
  std::optional<uint64_t> oldest() const override { return std::nullopt; }
  bool advance() override { return matcher_.advance(); }

 private:
  calls::InFlight inFlightOf(const Transfer& transfer) const;
  void count(const Transfer& transfer);

  // Matcher::Host.
  void sendControl(Rank to, transport::Bytes message) override { channels_.control(to, message); }
  transport::SendChannel& sendChannel(Rank to) override { return channels_.messageSender(to); }
  transport::ReceiveChannel& receiveChannel(Rank from) override {
    return channels_.messageReceiver(from);
  }
  void onComplete(Transfer& transfer) override {
    if (metrics_ != nullptr) count(transfer);
    ended_.complete(*transfer.completion, std::nullopt);
    ended_.release(std::move(transfer.message.keepAlive));
  }
  bool backlogged(Rank to) override { return channels_.hasBacklog(to); }
  Rank jobRank(Rank rank) const override { return membership_.jobRank(rank); }

  process::Process& process_;
  const team::Membership& membership_;
  plans::Channels& channels_;
  calls::EndedOperations& ended_;
  observe::Metrics::Group* const metrics_;           // null: nothing is counted; also the next two
  observe::Metrics::Algorithm* const countedSends_;  // …
  observe::Metrics::Algorithm* const countedReceives_;
  Matcher matcher_;
};

}  // namespace smddp::engine::operations
