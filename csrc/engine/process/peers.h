// The other processes that this one has met, and what it knows of them: whether they share memory with it, and whether
// they are gone.
//
// Owns the lifelines to processes of other nodes, and keeps the memory of mates mapped. Used by the thread that owns
// the engine.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/introduction.h"
#include "bootstrap/lifeline.h"
#include "common/clock.h"
#include "common/ownership.h"
#include "transport/channel_table.h"
#include "transport/shm/comm_memory.h"
#include "transport/shm/liveness.h"
#include "transport/shm/process_page.h"
#include "transport/transport.h"

namespace smddp::engine::process {

using bootstrap::ProcessId;

// Another process, as this one knows it.
struct Peer {
  bootstrap::Introduction introduction;
  // Set when it shares memory with us.
  std::shared_ptr<transport::shm::Mate> mate;
  std::unique_ptr<transport::shm::MateMemory> memory;
  // The number with which control messages and channels reach it, in the shared-memory or the fabric transport.
  transport::PeerId id = -1;
  transport::ChannelTable* table = nullptr;
  // Why no further message will come from it, once known.
  std::optional<std::string> lost;
  bool died = false;          // lost without having left in order; its host may only be silent
  bool isGone = false;        // certainly: it has ended or left in order, and does nothing any more
  bool isUnreached = false;   // the reason why it is lost: there never was a connection to it
  bool isHostSilent = false;  // the reason why it is lost
  Nanoseconds lostAt = 0;
  // Why the transport has lost it, and when. The lifeline says what that means, and may do so later.
  std::optional<std::string> disconnected;
  Nanoseconds disconnectedAt = 0;
  // Valid for mates, see isStopped(); as of `lookedAt`.
  bool stopped = false;
  Nanoseconds lookedAt = 0;

  // True if a signal or a debugger has stopped the process of this mate. Looks a few times a second.
  bool isStopped(const Clock& clock);

  // "pid 40122 on ip-10-0-1-7"
  static std::string describe(const bootstrap::Introduction& introduction);
  std::string describe() const { return describe(introduction); }
};

class Peers {
 public:
  // `ownership` and `clock` outlive this. `hostTimeout`: how long a peer may be disconnected before it counts as lost,
  // while its lifeline says nothing.
  Peers(const Ownership& ownership, const Clock& clock, Nanoseconds hostTimeout)
      : ownership_(ownership), clock_(clock), hostTimeout_(hostTimeout) {}
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // Null for a process that this one has not met.
  Peer* find(const ProcessId& id);
  Peer& add(std::unique_ptr<Peer> peer);
  // From now on lifelines tell when a process of another node is gone. Call it before the first one is met.
  void watch(std::unique_ptr<bootstrap::Lifeline> lifeline);
  // The address to which others connect their lifelines; empty without lifelines.
  std::vector<std::byte> lifelineAddress() const;
  // Readable when check() has something to do for lifelines; negative without lifelines.
  int lifelineDescriptor() const;
  // The process ends: tells those of other nodes.
  void leave() SMDDP_NO_THREAD_ANALYSIS;
  // For the child of a fork that found the engine at a stop.
  void closeInChild() noexcept SMDDP_NO_THREAD_ANALYSIS;

  // Looks for peers that are gone. Too slow for the fast path.
  void check();
  // The transport has lost a peer.
  void onDisconnected(Peer& peer, const std::string& cause);
  // A rank waits for this remote peer: probes its host. check() then finds a host that does not answer.
  void probeHost(Peer& peer);
  // Counts a remote peer as lost because its host is silent, and sends it a notice, which it may not receive.
  void giveUp(Peer& peer, const std::string& cause);
  // The result of the probes; nullopt without lifelines.
  std::optional<bootstrap::Silence> silenceOf(const Peer& peer) const;
  // True if the hosts of all remote peers that are not gone have received everything that was sent to them.
  bool isAllDelivered() const;
  // The first of these processes that was given up because no connection to it could be made, and why.
  struct Unreached {
    Rank rank;
    std::string cause;
  };
  std::optional<Unreached> unreachedAmong(
      const std::vector<bootstrap::Introduction>& introductions) const;
  // Returns the processes among these to which there is no lifeline yet, and that are not known to be gone. check()
  // tries to connect them.
  std::vector<Rank> unconnectedAmong(
      const std::vector<bootstrap::Introduction>& introductions) const;
  // The pages of the processes that share memory with us.
  std::span<const transport::shm::ProcessPage* const> matePages() const {
    ownership_.assertOwned();
    return matePages_;
  }

 private:
  void lose(Peer& peer, bool died, const std::string& cause);
  void checkDisconnected(Peer& peer);

  const Ownership& ownership_;
  const Clock& clock_;
  const Nanoseconds hostTimeout_;
  std::map<ProcessId, std::unique_ptr<Peer>> peers_ SMDDP_GUARDED_BY(ownership_);
  // Kept mapped by peers_.
  std::vector<const transport::shm::ProcessPage*> matePages_ SMDDP_GUARDED_BY(ownership_);
  std::unique_ptr<bootstrap::Lifeline> lifeline_ SMDDP_GUARDED_BY(ownership_);
};

}  // namespace smddp::engine::process
