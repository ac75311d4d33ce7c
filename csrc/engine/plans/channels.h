// The channels of one group: how its ranks send to one another, within a node and between nodes.
//
// A channel is opened when a plan or a message first needs it. Owns the windows (memory that senders write to) of the
// receiving ends; they are given back when nobody can write to them any more (allowGiveBack()), or kept until the
// process ends. Used by the thread that owns the engine.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "engine/memory/window_pool.h"
#include "engine/plans/cached_plan.h"
#include "engine/process/process.h"
#include "engine/team/membership.h"
#include "engine/team/track.h"
#include "plan/plan.h"

namespace smddp::engine::plans {

class Channels {
 public:
  // The arguments outlive the channels.
  Channels(process::Process& process, const team::Membership& membership,
           const plan::Limits& limits);
  ~Channels();
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  // Opens what a plan needs on this track.
  void open(team::Track& track, const CachedPlan& cached);
  // If this rank receives on the track: sends all grants now, also those that ReceiveChannel::release() holds back to
  // send several at once.
  void sendGrantsNow(const team::Track& track);

  // The channels for messages between two ranks (Matcher).
  transport::SendChannel& messageSender(Rank to);
  transport::ReceiveChannel& messageReceiver(Rank from);

  // Sends a control message of the engine. Throws Resource if there is no descriptor for a connection.
  void control(Rank to, transport::Bytes message);
  // Sends a message that the other rank can do without: if there is no descriptor, it sends nothing. So it is safe
  // where an error is handled.
  void tell(Rank to, transport::Bytes message);
  // True if control messages to this rank still wait for room.
  bool hasBacklog(Rank to) const { return peerOf(to).table->hasBacklog(); }

  // This rank no longer uses the channels.
  void close();
  // After close(): whether no put of this group to or from the rank can still read or write our memory.
  bool isDrained(Rank rank) const {
    return peerOf(rank).table->drained(membership_.group, peerOf(rank).id);
  }
  // No rank writes to the windows any more, so the destructor may give them back. Windows to which messages of lost
  // ranks may still be on their way are kept.
  void allowGiveBack();

 private:
  struct Window {
    std::span<std::byte> memory;
    Rank from;
  };

  process::Peer& peerOf(Rank rank) const { return *membership_.peers[rank]; }
  transport::ReceiveChannel& openReceiver(Rank from, uint8_t track, uint8_t subchannel,
                                          int64_t window, int64_t messageBytes);

  process::Process& process_;
  const std::shared_ptr<memory::WindowPool> pool_;  // outlives the process object
  const team::Membership& membership_;
  const plan::Limits& limits_;
  std::map<Rank, transport::ReceiveChannel*> messageReceivers_;
  std::vector<Window> windows_;
  bool mayGiveBack_ = false;
};

}  // namespace smddp::engine::plans
