#include "engine/health/diagnosis.h"

namespace smddp::engine::health {
namespace {

// The end of a remote process may be known before its last bytes are read here. They are in this host by then if it has
// left in order (Engine::shutdown). If it has died, they may be under way for longer, but then its death is an error in
// any case, which a longer time would only delay.
constexpr Nanoseconds kLastBytes = 10'000'000;
// A host that has answered nothing for this long is blamed; the lifeline gives it up later.
constexpr Nanoseconds kHostSilence = 500'000'000;

}  // namespace

void Diagnosis::inquire(const std::set<Rank>& awaited, uint64_t sequence,
                        const transport::CallFingerprint& call) {
  for (const Rank rank : awaited) {
    process::Peer* peer = membership_.reachable(rank);
    if (peer == nullptr) continue;
    inquiries_.asked(rank, process_.clock().now());
    process_.peers().probeHost(*peer);
    team::InquiryMessage message;
    message.group = membership_.group;
    message.sequence = sequence;
    message.call = call;
    channels_.tell(rank, transport::bytesOf(message));
  }
}

team::Blame Diagnosis::blameFor(const std::set<Rank>& awaited, uint64_t sequence) const {
  team::Blame found;
  for (const Rank rank : awaited) {
    const team::Blame blame = blameOn(rank, sequence);
    // Comes first: what others said before of a rank on such a host may no longer be true.
    if (blame.why == team::Blame::Why::Unreachable) return blame;
    if (found.rank < 0 || (blame.definite() && !found.definite())) found = blame;
  }
  return found;
}

team::Blame Diagnosis::blameOn(Rank rank, uint64_t sequence) const {
  const Rank me = membership_.me();
  if (!membership_.isMate(rank)) {
    const auto silence = process_.peers().silenceOf(*membership_.peers[rank]);
    if (silence && silence->host >= kHostSilence) return {rank, team::Blame::Why::Unreachable};
    if (inquiries_.isSilent(rank, process_.clock().now()) &&
        (!silence || silence->process >= team::Inquiries::kSilence)) {
      return {rank, team::Blame::Why::Silent};
    }
    const team::Blame theirs = inquiries_.of(rank);
    // Another node may not hear a rank of this node, but this rank does: then that rank is not at fault.
    const bool isHeardHere =
        theirs.rank >= 0 && membership_.isMate(theirs.rank) &&
        (theirs.why == team::Blame::Why::Silent || theirs.why == team::Blame::Why::Unreachable);
    return theirs.rank == me || isHeardHere ? team::Blame{rank} : theirs;
  }
  if (membership_.peers[rank]->isStopped(process_.clock()))
    return {rank, team::Blame::Why::Stopped};
  const uint64_t called = team_.calledBy(rank);
  if (called < sequence) return {rank, team::Blame::Why::NotCalled, static_cast<uint32_t>(called)};
  const team::Blame theirs = team_.blameOf(rank);
  return theirs.definite() && theirs.rank != me ? theirs : team::Blame{rank};
}

std::string Diagnosis::culprit(const team::Blame& blame) const {
  if (!blame.definite()) return "";
  const auto trouble = troubleOf(blame.rank);
  return fmt::format("; {} {}{}", membership_.nameOf(blame.rank), blame.describe(),
                     trouble ? fmt::format(", since {}", *trouble) : "");
}

bool Diagnosis::isLost(Rank rank) const {
  const process::Peer* peer = membership_.peers[rank];
  if (peer == nullptr) return false;
  if (membership_.isMate(rank)) return peer->lost || team_.hasLeft(rank);
  return peer->lost && process_.clock().now() - peer->lostAt >= kLastBytes;
}

bool Diagnosis::isLostFor(const calls::InFlight& at, Rank rank) const {
  if (isLost(rank)) return true;
  const auto left = left_.find(rank);
  if (left == left_.end()) return false;
  return at.sequence == 0 ? at.isUnmatched : at.sequence > left->second;
}

std::optional<Rank> Diagnosis::lostIfAllAre() const {
  std::optional<Rank> lost;
  for (Rank rank = 0; rank < membership_.size(); ++rank) {
    if (rank == membership_.me()) continue;
    if (!isLost(rank)) return std::nullopt;
    lost = rank;
  }
  return lost;
}

std::optional<std::string> Diagnosis::troubleOf(Rank rank) const {
  if (rank == membership_.me()) return std::nullopt;
  std::optional<team::Trouble> found;
  if (membership_.isMate(rank)) {
    found = team_.troubleOf(rank);
  } else if (const auto theirs = troubles_.find(rank); theirs != troubles_.end()) {
    const auto left = left_.find(rank);
    if (left == left_.end() || left->second <= theirs->second.calls) found = theirs->second;
  }
  return found ? std::optional(found->text) : std::nullopt;
}

std::string Diagnosis::howLost(Rank rank) const {
  const process::Peer* peer = membership_.peers[rank];
  return peer != nullptr && peer->lost ? *peer->lost : "it left the group";
}

}  // namespace smddp::engine::health
