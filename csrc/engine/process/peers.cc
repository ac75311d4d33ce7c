#include "engine/process/peers.h"

#include <algorithm>

namespace smddp::engine::process {
namespace {

// The time between two checks whether a mate is stopped.
constexpr Nanoseconds kStoppedPeriod = 200'000'000;

}  // namespace

bool Peer::isStopped(const Clock& clock) {
  const Nanoseconds now = clock.now();
  if (now - lookedAt >= kStoppedPeriod) {
    lookedAt = now;
    stopped = transport::shm::isStopped(*mate);
  }
  return stopped;
}

std::string Peer::describe(const bootstrap::Introduction& introduction) {
  return fmt::format("pid {} on {}", introduction.pid, introduction.host);
}

Peer* Peers::find(const ProcessId& id) {
  ownership_.assertOwned();
  const auto known = peers_.find(id);
  return known == peers_.end() ? nullptr : known->second.get();
}

Peer& Peers::add(std::unique_ptr<Peer> peer) {
  ownership_.assertOwned();
  const bootstrap::Introduction& other = peer->introduction;
  if (peer->mate) {
    matePages_.push_back(&peer->mate->page());
  } else if (lifeline_) {
    lifeline_->connect(other.lifeline, peer->describe());
  }
  return *(peers_[other.processId] = std::move(peer));
}

void Peers::watch(std::unique_ptr<bootstrap::Lifeline> lifeline) {
  ownership_.assertOwned();
  lifeline_ = std::move(lifeline);
}

std::vector<std::byte> Peers::lifelineAddress() const {
  ownership_.assertOwned();
  return lifeline_ ? lifeline_->address() : std::vector<std::byte>();
}

int Peers::lifelineDescriptor() const {
  ownership_.assertOwned();
  return lifeline_ ? lifeline_->descriptor() : -1;
}

void Peers::leave() {
  if (lifeline_) lifeline_->leave();
  lifeline_.reset();
}

void Peers::closeInChild() noexcept {
  if (lifeline_) lifeline_->closeInChild();
}

void Peers::onDisconnected(Peer& peer, const std::string& cause) {
  ownership_.assertOwned();
  peer.disconnected = cause;
  peer.disconnectedAt = clock_.now();
  checkDisconnected(peer);
}

bool Peers::isAllDelivered() const {
  ownership_.assertOwned();
  return std::all_of(peers_.begin(), peers_.end(), [](const auto& entry) {
    const Peer& peer = *entry.second;
    return peer.mate || peer.lost || peer.table->isDelivered(peer.id);
  });
}

void Peers::check() {
  ownership_.assertOwned();
  if (lifeline_) {
    lifeline_->poll([&](const bootstrap::Lifeline::Departure& departure) {
      ownership_.assertOwned();
      const auto found = peers_.find(departure.process);
      if (found == peers_.end()) return;
      found->second->isUnreached |= !departure.wasReached && !found->second->lost;
      found->second->isGone |= departure.orderly || departure.isDead;
      lose(*found->second, !departure.orderly, departure.cause);
    });
  }
  for (auto& [id, peer] : peers_) {
    checkDisconnected(*peer);
    // Looks also at a mate that the transport has lost, because the transport does not know whether it died.
    if (!peer->mate || peer->died) continue;
    const auto life = transport::shm::lifeOf(*peer->mate);
    if (life == transport::shm::Life::Running) continue;
    peer->isGone = true;
    lose(*peer, life == transport::shm::Life::Died, transport::shm::describeLife(*peer->mate));
  }
}

std::optional<Peers::Unreached> Peers::unreachedAmong(
    const std::vector<bootstrap::Introduction>& introductions) const {
  ownership_.assertOwned();
  for (size_t rank = 0; rank < introductions.size(); ++rank) {
    const auto found = peers_.find(introductions[rank].processId);
    if (found == peers_.end() || !found->second->isUnreached) continue;
    return Unreached{static_cast<Rank>(rank), found->second->lost.value_or("")};
  }
  return std::nullopt;
}

std::vector<Rank> Peers::unconnectedAmong(
    const std::vector<bootstrap::Introduction>& introductions) const {
  ownership_.assertOwned();
  std::vector<Rank> ranks;
  for (size_t rank = 0; lifeline_ && rank < introductions.size(); ++rank) {
    if (lifeline_->isExpected(introductions[rank].processId))
      ranks.push_back(static_cast<Rank>(rank));
  }
  return ranks;
}

void Peers::lose(Peer& peer, bool died, const std::string& cause) {
  ownership_.assertOwned();
  peer.died |= died;
  if (peer.lost) return;
  peer.lost = cause;
  peer.lostAt = clock_.now();
}

// A connection also ends when its peer leaves in order, so its end is no death. The lifeline tells the reason, but may
// be seconds late: on a link that loses packets the kernel sends its bytes again, with growing pauses. If the lifeline
// tells nothing within the host time-out, only this connection has failed. Then the peer counts as lost.
void Peers::checkDisconnected(Peer& peer) {
  ownership_.assertOwned();
  if (!peer.disconnected || peer.lost) return;
  const bool lifelineMayTell = lifeline_ && !peer.mate;
  if (lifelineMayTell && clock_.now() - peer.disconnectedAt < hostTimeout_) return;
  lose(peer, /*died=*/false, *peer.disconnected);
}

void Peers::probeHost(Peer& peer) {
  ownership_.assertOwned();
  if (lifeline_ && lifeline_->probe(peer.introduction.processId)) peer.isHostSilent = true;
}

void Peers::giveUp(Peer& peer, const std::string& cause) {
  ownership_.assertOwned();
  peer.isHostSilent = true;
  if (lifeline_) lifeline_->giveUp(peer.introduction.processId, cause);
}

std::optional<bootstrap::Silence> Peers::silenceOf(const Peer& peer) const {
  ownership_.assertOwned();
  if (!lifeline_) return std::nullopt;
  return lifeline_->silenceOf(peer.introduction.processId);
}

}  // namespace smddp::engine::process
