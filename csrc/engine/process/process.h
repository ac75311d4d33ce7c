// The things that a process has once, for all its groups: shared memory, transports, lifelines, and the other processes
// that it has met. A process meets another one once; sub-groups reuse memory and connections.
//
// Threads: made and used by the thread that owns the engine, except where marked. Ranks may be threads of one
// operating-system process (tests): each then has a Process of its own.
// Ends with the engine. Mates see in shared memory that we left; remote peers get a goodbye on their lifelines.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/introduction.h"
#include "common/clock.h"
#include "common/config.h"
#include "common/mutex.h"
#include "common/ownership.h"
#include "engine/memory/region_pool.h"
#include "engine/memory/window_pool.h"
#include "engine/observe/metrics.h"
#include "engine/observe/status_board.h"
#include "engine/process/peers.h"
#include "transport/channel_table.h"
#include "transport/shm/comm_memory.h"
#include "transport/shm/doorbell.h"
#include "transport/shm/shm_transport.h"
#include "transport/shm/slab.h"
#include "transport/transport.h"

namespace smddp::engine::process {

// Memory that the process shares with the others of its node, and what hands out parts of it. Each part is thread-safe,
// and may be kept beyond the end of the process object.
struct NodeMemory {
  NodeMemory(size_t slabBytes, size_t cacheBytes)
      : slab(transport::shm::Slab::create(slabBytes)),
        regions(std::make_shared<memory::RegionPool>(slab)),
        windows(std::make_shared<memory::WindowPool>(slab)),
        tensors(std::make_shared<transport::shm::CommMemory>(slab, cacheBytes)) {}

  const std::shared_ptr<transport::shm::Slab> slab;
  const std::shared_ptr<memory::RegionPool> regions;  // of groups
  const std::shared_ptr<memory::WindowPool> windows;  // of channels
  const std::shared_ptr<transport::shm::CommMemory> tensors;
};

class Process {
 public:
  struct Options {
    Settings settings;
    std::shared_ptr<Clock> clock = std::make_shared<MonotonicClock>();
    // Instead of a libfabric endpoint; the simulator's.
    std::function<std::unique_ptr<transport::Transport>()> fabric;
    // Instead of a random one; the simulator's.
    std::optional<ProcessId> id;
    size_t slabBytes = transport::shm::Slab::kDefaultReserve;
    // TCP connections that tell when a remote process is gone.
    bool lifelines = true;
    // Counts calls if it is given.
    std::shared_ptr<observe::Metrics> metrics;
  };
  // Receives control messages that are not about channels. `from` is never null.
  using ControlHandler = std::function<void(Peer& from, transport::Bytes message)>;

  // `ownership` is the engine's.
  Process(Options options, const Ownership& ownership);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  const Settings settings;  // [any thread]

  // A function that runs on the thread that owns the engine begins with ownership().assertOwned().
  const Ownership& ownership() const SMDDP_RETURN_CAPABILITY(ownership_) { return ownership_; }
  const Clock& clock() const { return *options_.clock; }
  const ProcessId& id() const { return id_; }
  // A number that no group of any process has had before.
  uint64_t newGroupId();
  const NodeMemory& memory() const { return memory_; }
  Peers& peers() { return peers_; }
  const std::shared_ptr<transport::shm::Doorbell>& doorbell() { return doorbell_; }
  observe::StatusBoard& status() { return status_; }
  // Null: nothing is counted.
  const std::shared_ptr<observe::Metrics>& metrics() const { return options_.metrics; }

  // A number that says how the ranks were divided into nodes (bootstrap::Locality). Introductions contain it from now
  // on.
  void setNodeAgreement(uint64_t agreement);
  // The information that we publish. It has the addresses between nodes only after openFabric().
  bootstrap::Introduction introduce(std::vector<std::byte> group);
  // Maps the memory of `other`, and keeps the mapping. False if it cannot be mapped here. Throws Resource if our
  // process has no descriptor or address space left. [thread-safe]
  bool tryMap(const bootstrap::Introduction& other, std::string* why);
  // Creates the endpoint and the lifelines, at the address `host` (addressForPeers()); once. Throws Usage when built
  // without libfabric.
  // Throws Resource when there are not enough descriptors for `remotePeers` as well.
  void openFabric(size_t remotePeers, const std::string& host);
  bool hasFabric() const {
    ownership_.assertOwned();
    return fabric_ != nullptr;
  }
  // The peer behind an introduction; connected by shared memory when `sharesNode`, else by the fabric.
  Peer& meet(const bootstrap::Introduction& other, bool sharesNode);
  // The key under which peers on the same table write into our slab.
  transport::RemoteKey registerMemory(const Peer& peer, std::span<std::byte> memory);
  // Puts to remote peers will often leave from here, in our slab: registers it with the network.
  void addSource(std::span<std::byte> memory);
  // Registers memory of a device with the network, see Transport.
  std::string addDeviceSource(const transport::DeviceMemory& memory);
  void removeDeviceSource(std::span<std::byte> memory);

  void setControlHandler(ControlHandler handler) { handler_ = std::move(handler); }

  // Moves messages. Returns how many events there were.
  size_t poll();
  // A group has failed, or could not be made; the text is for users. The first failure counts until it is taken.
  // False if the one before had the same text: a lost rank, or an abort, often ends several groups.
  bool noteFailure(const std::string& text) {
    ownership_.assertOwned();
    if (failure_.empty()) failure_ = text;
    return std::exchange(lastFailure_, text) != text;
  }
  std::string takeFailure() {
    ownership_.assertOwned();
    return std::exchange(failure_, {});
  }
  // Sleeps until a mate rings, until `timeout` is over, or, with `network`, until the network has something. The caller
  // has called prepare() of the doorbell and looked once more.
  void sleep(Nanoseconds timeout, bool network);
  // One line about what was chosen between nodes; empty on a single node.
  std::string describeFabric() const;

 private:
  // One transport with its channels. It knows which peer has which number in this transport.
  struct Link final : transport::ControlSink {
    Link(Process& process, std::unique_ptr<transport::Transport> moved)
        : owner(process), transport(std::move(moved)), table(*transport, *this) {}
    void onControl(transport::PeerId from, transport::Bytes message) override;
    void onPeerFailed(transport::PeerId peer, const std::string& cause) override;

    Process& owner;
    std::unique_ptr<transport::Transport> transport;
    transport::ChannelTable table;
    std::map<transport::PeerId, Peer*> peers;
  };

  Link& linkOf(const Peer& peer) SMDDP_REQUIRES(ownership_) {
    return peer.mate ? *local_ : *fabric_;
  }

  const Ownership& ownership_;
  Options options_;
  ProcessId id_;
  uint64_t lastGroup_ SMDDP_GUARDED_BY(ownership_) =
      0;  // how many groups this process has numbered
  std::string failure_ SMDDP_GUARDED_BY(ownership_);
  std::string lastFailure_ SMDDP_GUARDED_BY(ownership_);  // stays when failure_ is taken
  uint64_t nodeAgreement_ SMDDP_GUARDED_BY(ownership_) = 0;
  const NodeMemory memory_;
  observe::StatusBoard status_;
  // Shared with threads that ring it while the process object ends.
  const std::shared_ptr<transport::shm::Doorbell> doorbell_;
  ControlHandler handler_;
  Peers peers_;
  Mutex mapMutex_;
  std::map<ProcessId, std::shared_ptr<transport::shm::Mate>> mapped_ SMDDP_GUARDED_BY(mapMutex_);
  std::unique_ptr<Link> local_;
  std::unique_ptr<Link> fabric_ SMDDP_GUARDED_BY(ownership_);
};

}  // namespace smddp::engine::process
