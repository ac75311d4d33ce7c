#include "engine/process/process.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "common/log.h"
#include "engine/process/wait_policy.h"
#include "transport/network/network.h"

namespace smddp::engine::process {
namespace {

using transport::shm::SegmentAddress;

// Before its sockets are closed, the process reads what peers send, until nothing has come for this long; for at most
// ten times as long in all.
constexpr Nanoseconds kQuietTime = 20'000'000;

// The address of shared memory begins with where the slab lies; the rest is the transport's.
SegmentAddress slabAddress(const bootstrap::Introduction& introduction) {
  SegmentAddress address;
  if (introduction.slab.size() < sizeof address) {
    raise(ErrorKind::Transport,
          "the memory address of pid {} on {} has {} bytes, at least {} needed", introduction.pid,
          introduction.host, introduction.slab.size(), sizeof address);
  }
  std::memcpy(&address, introduction.slab.data(), sizeof address);
  return address;
}

// Checked before the endpoint is made, because providers do not say why they fail.
void requireDescriptors(size_t remotePeers) {
  // Endpoint, queues and lifelines of this process; connections in both directions and a lifeline per peer.
  constexpr size_t kOwn = 20, kPerPeer = 3;
  const size_t needed = kOwn + kPerPeer * remotePeers;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  std::error_code unreadable;
  const std::filesystem::directory_iterator open("/proc/self/fd", unreadable);
  // Looking takes a descriptor, too.
  const auto used = static_cast<size_t>(std::distance(begin(open), end(open)));
  if (unreadable && unreadable.value() != EMFILE) return;
  const size_t left = unreadable || limit.rlim_cur < used ? 0 : limit.rlim_cur - used;
  if (left >= needed) return;
  raise(ErrorKind::Resource,
        "the network between nodes needs about {} file descriptors here, and {} of {} are left; "
        "raise the limit of open files (ulimit -n)",
        needed, left, limit.rlim_cur);
}

}  // namespace

void Process::Link::onControl(transport::PeerId from, transport::Bytes message) {
  const auto found = peers.find(from);
  if (found != peers.end() && owner.handler_) owner.handler_(*found->second, message);
}

void Process::Link::onPeerFailed(transport::PeerId peer, const std::string& cause) {
  const auto found = peers.find(peer);
  if (found != peers.end()) owner.peers_.onDisconnected(*found->second, cause);
}

Process::Process(Options options, const Ownership& ownership)
    : settings(std::move(options.settings)),
      ownership_(ownership),
      options_(std::move(options)),
      id_(options_.id ? *options_.id : bootstrap::randomProcessId()),
      memory_(options_.slabBytes, static_cast<size_t>(settings.commMemoryCacheBytes)),
      doorbell_(std::make_shared<transport::shm::Doorbell>(memory_.slab)),
      peers_(ownership, *options_.clock, fromSeconds(settings.hostTimeout)),
      local_(std::make_unique<Link>(
          *this, std::make_unique<transport::shm::ShmTransport>(
                     memory_.slab, transport::shm::parseStagingStores(settings.stagingStores)))) {}

Process::~Process() {
  if (fabric_) {
    // A socket that is closed with unread bytes in it resets the connection, and the peer may then lose what
    // it has not read yet.
    Nanoseconds quietSince = clock().now();
    const Deadline deadline = Deadline::after(clock(), 10 * kQuietTime);
    while (options_.lifelines && clock().now() - quietSince < kQuietTime &&
           !deadline.passed(clock())) {
      try {
        if (fabric_->table.poll() > 0) quietSince = clock().now();
      } catch (const Error&) {
        break;
      }
    }
  }
  peers_.leave();
}

// Unique because the process id is random. Multiplied by this odd number, the count of groups changes all bits.
uint64_t Process::newGroupId() {
  ownership_.assertOwned();
  uint64_t random = 0;
  std::memcpy(&random, id_.data(), sizeof random);
  return random ^ ++lastGroup_ * 0x9e3779b97f4a7c15;
}

bootstrap::Introduction Process::introduce(std::vector<std::byte> group) {
  ownership_.assertOwned();
  bootstrap::Introduction mine = bootstrap::introduceThisProcess(settings, id_);
  mine.slab = local_->transport->address();
  if (fabric_) mine.fabric = fabric_->transport->address();
  mine.lifeline = peers_.lifelineAddress();
  mine.nodeAgreement = nodeAgreement_;
  mine.group = std::move(group);
  return mine;
}

void Process::setNodeAgreement(uint64_t agreement) {
  ownership_.assertOwned();
  nodeAgreement_ = agreement;
}

bool Process::tryMap(const bootstrap::Introduction& other, std::string* why) {
  const MutexLock lock(mapMutex_);
  if (mapped_.contains(other.processId)) return true;
  try {
    mapped_[other.processId] = transport::shm::Mate::attach(slabAddress(other));
    return true;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Resource) throw;
    *why = error.what();
    return false;
  }
}

void Process::openFabric(size_t remotePeers, const std::string& host) {
  ownership_.assertOwned();
  if (fabric_) return;
  if (!options_.fabric) requireDescriptors(remotePeers);
  // Sleeping needs a pipe from now on. Nothing of this is kept when the rest fails: the next group tries again.
  doorbell_->openPipe();
  std::unique_ptr<bootstrap::Lifeline> lifeline;
  if (options_.lifelines) {
    bootstrap::Lifeline::Options options;
    options.seal = Seal(settings.jobToken.text);
    options.hostTimeout = fromSeconds(settings.hostTimeout);
    lifeline = std::make_unique<bootstrap::Lifeline>(id_, host, options);
  }
  fabric_ = std::make_unique<Link>(
      *this, options_.fabric ? options_.fabric() : transport::network::open(settings, host));
  peers_.watch(std::move(lifeline));
  SMDDP_LOG(Info, "transport", "{}", describeFabric());
}

std::string Process::describeFabric() const {
  ownership_.assertOwned();
  return fabric_ ? fabric_->transport->describe() : "";
}

Peer& Process::meet(const bootstrap::Introduction& other, bool sharesNode) {
  ownership_.assertOwned();
  if (Peer* known = peers_.find(other.processId)) return *known;
  auto peer = std::make_unique<Peer>();
  peer->introduction = other;
  const std::string name = peer->describe();
  if (sharesNode) {
    std::string why;
    if (!tryMap(other, &why)) {
      raise(ErrorKind::Transport, "the memory of {} cannot be mapped any more: {}", name, why);
    }
    const MutexLock lock(mapMutex_);
    peer->mate = mapped_[other.processId];
    peer->memory = std::make_unique<transport::shm::MateMemory>(peer->mate);
  }
  Link& link = linkOf(*peer);
  peer->id = link.transport->connect(sharesNode ? other.slab : other.fabric, name);
  peer->table = &link.table;
  link.peers[peer->id] = peer.get();
  return peers_.add(std::move(peer));
}

transport::RemoteKey Process::registerMemory(const Peer& peer, std::span<std::byte> memory) {
  ownership_.assertOwned();
  Link& link = linkOf(peer);
  const transport::RemoteKey key = link.transport->registerMemory(memory);
  if (&link == fabric_.get()) memory_.slab->keep(memory);
  return key;
}

void Process::addSource(std::span<std::byte> memory) {
  ownership_.assertOwned();
  if (fabric_->transport->addSource(memory)) memory_.slab->keep(memory);
}

std::string Process::addDeviceSource(const transport::DeviceMemory& memory) {
  ownership_.assertOwned();
  if (!fabric_) return "there is no other node";
  return fabric_->transport->addDeviceSource(memory);
}

void Process::removeDeviceSource(std::span<std::byte> memory) {
  ownership_.assertOwned();
  if (fabric_) fabric_->transport->removeDeviceSource(memory);
}

size_t Process::poll() {
  ownership_.assertOwned();
  return local_->table.poll() + (fabric_ ? fabric_->table.poll() : 0);
}

void Process::sleep(Nanoseconds timeout, bool network) {
  ownership_.assertOwned();
  if (local_->table.hasBacklog() || (fabric_ && fabric_->table.hasBacklog())) {
    timeout = std::min(timeout, WaitPolicy::kNetworkPoll);
  }
  if (!network || !fabric_) {
    doorbell_->sleep(timeout);
    return;
  }
  const int descriptor = fabric_->transport->waitDescriptor();
  if (descriptor < 0) {
    doorbell_->sleep(std::min(timeout, WaitPolicy::kNetworkPoll));
  } else if (fabric_->transport->prepareWait()) {
    doorbell_->sleepOn(descriptor, timeout);
  } else {
    doorbell_->cancel();
  }
}

}  // namespace smddp::engine::process
