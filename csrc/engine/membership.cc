#include "engine/membership.h"

#include <algorithm>
#include <cstring>

#include "engine/call.h"

namespace smddp::engine {

std::vector<std::byte> GroupEntry::encode() const {
  std::vector<std::byte> bytes(sizeof *this);
  std::memcpy(bytes.data(), this, sizeof *this);
  return bytes;
}

GroupEntry GroupEntry::decode(const bootstrap::Introduction& introduction) {
  GroupEntry entry;
  if (introduction.group.size() != sizeof entry) {
    raise(ErrorKind::Transport, "the group's entry of pid {} on {} is malformed", introduction.pid,
          introduction.host);
  }
  std::memcpy(&entry, introduction.group.data(), sizeof entry);
  return entry;
}

Peer* Membership::reachable(Rank rank) const {
  Peer* peer = peers[rank];
  return peer == nullptr || isMate(rank) || peer->lost ? nullptr : peer;
}

std::optional<Rank> Membership::rankOf(const Peer& peer) const {
  const auto found = std::find(peers.begin(), peers.end(), &peer);
  if (found == peers.end()) return std::nullopt;
  return static_cast<Rank>(found - peers.begin());
}

std::string Membership::nameOf(Rank rank) const {
  const Peer* peer = peers[rank];
  return fmt::format("rank {} ({})", rank, peer == nullptr ? self : peer->describe());
}

Error Membership::failed(const std::string& what, const Error& cause) const {
  return Error(cause.kind(), fmt::format("smddp: {}{} failed on rank {}/{}: {}", what,
                                         ofCallbacks ? " (called by a callback of a future)" : "",
                                         me(), size(), cause.what()));
}

void Membership::requireSameCall(Rank rank, const transport::CallFingerprint& theirs,
                                 const transport::CallFingerprint& mine) const {
  if (sameCall(theirs, mine)) return;
  raise(ErrorKind::Mismatch,
        "{} is in {} while rank {} is in {}: all ranks must make the same calls in the same order",
        nameOf(rank), describe(theirs), me(), describe(mine));
}

}  // namespace smddp::engine
