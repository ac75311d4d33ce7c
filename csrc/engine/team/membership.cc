#include "engine/team/membership.h"

#include <algorithm>
#include <cstring>

#include "engine/calls/call.h"

namespace smddp::engine::team {

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

process::Peer* Membership::reachable(Rank rank) const {
  process::Peer* peer = peers[rank];
  return peer == nullptr || isMate(rank) || peer->lost ? nullptr : peer;
}

std::optional<Rank> Membership::rankOf(const process::Peer& peer) const {
  const auto found = std::find(peers.begin(), peers.end(), &peer);
  if (found == peers.end()) return std::nullopt;
  return static_cast<Rank>(found - peers.begin());
}

bool Membership::isPart() const {
  for (Rank rank = 0; rank < size(); ++rank) {
    if (jobRank(rank) != rank) return true;
  }
  return false;
}

std::string Membership::listOf(const std::set<Rank>& ranks) const {
  std::string list;
  for (const Rank rank : ranks)
    list += fmt::format("{}{}", list.empty() ? "" : ", ", jobRank(rank));
  return list;
}

std::string Membership::describe(const transport::CallFingerprint& call) const {
  return engine::calls::describe(call, jobRanks);
}

std::string Membership::nameOf(Rank rank) const {
  const process::Peer* peer = peers[rank];
  return fmt::format("rank {} ({})", jobRank(rank), peer == nullptr ? self : peer->describe());
}

Error Membership::failed(const std::string& what, const Error& cause) const {
  const std::string where =
      isPart() ? fmt::format("{} ({}/{} of the group)", jobRank(me()), me(), size())
               : fmt::format("{}/{}", me(), size());
  return Error(cause.kind(), fmt::format("smddp: {}{} failed on rank {}: {}", what,
                                         ofCallbacks ? " (called by a callback of a future)" : "",
                                         where, cause.what()));
}

void Membership::requireSameCall(Rank rank, const transport::CallFingerprint& theirs,
                                 const transport::CallFingerprint& mine) const {
  if (calls::sameCall(theirs, mine)) return;
  raise(ErrorKind::Mismatch,
        "{} is in {} while rank {} is in {}: all ranks must make the same calls in the same order",
        nameOf(rank), describe(theirs), jobRank(me()), describe(mine));
}

}  // namespace smddp::engine::team
