// Finds the rank that is at fault when this rank waits: looks at mates, and asks ranks of other nodes (blame.h).
//
// Used by the thread that owns the engine.
#pragma once

#include <map>
#include <set>
#include <string>

#include "engine/calls/in_flight.h"
#include "engine/plans/channels.h"
#include "engine/team/blame.h"
#include "engine/team/membership.h"
#include "engine/team/team.h"

namespace smddp::engine::health {

class Diagnosis {
 public:
  // The arguments outlive this object.
  Diagnosis(process::Process& process, const team::Membership& membership, const team::Team& team,
            plans::Channels& channels)
      : process_(process), membership_(membership), team_(team), channels_(channels) {}

  // Asks those of the awaited ranks that are on other nodes, and tells them which call this one is in; sequence 0: in
  // send or recv. Mates are not asked: this rank reads their calls in the arrival records and whom they blame in their
  // regions.
  void inquire(const std::set<Rank>& awaited, uint64_t sequence,
               const transport::CallFingerprint& call);
  void onAnswer(Rank from, uint64_t blame) {
    inquiries_.answered(from, team::Blame::unpack(blame, membership_.size()));
  }
  // The rank has left the group after so many calls.
  void onLeft(Rank from, uint64_t calls) {
    inquiries_.answered(from, {from});
    left_[from] = calls;
  }
  void onTrouble(Rank from, team::Trouble trouble) { troubles_[from] = std::move(trouble); }
  // Forgets ranks that nothing waits for any more.
  void keepOnly(const std::set<Rank>& awaited) { inquiries_.keepOnly(awaited); }

  // A rank that cannot be reached, if there is one; else the first that is definitely at fault, be it an awaited rank
  // or one that an awaited rank blames; else the first awaited rank.
  team::Blame blameFor(const std::set<Rank>& awaited, uint64_t sequence) const;
  // "; rank 3 (…) has not made this call yet", or nothing when nobody is definitely at fault.
  std::string culprit(const team::Blame& blame) const;

  // Nothing more will come from this rank: it left, or it is gone.
  bool isLost(Rank rank) const;
  // Nothing more that this one waits for will come from the rank. Messages that it sent before it left may still be
  // under way.
  bool isLostFor(const calls::InFlight& at, Rank rank) const;
  // The last of the other ranks, if nothing more will come from any of them.
  std::optional<Rank> lostIfAllAre() const;
  // "its process died"
  std::string howLost(Rank rank) const;
  // The trouble that the rank had elsewhere before it stopped making calls of this group, in the words for its user.
  std::optional<std::string> troubleOf(Rank rank) const;

 private:
  team::Blame blameOn(Rank rank, uint64_t sequence) const;

  process::Process& process_;
  const team::Membership& membership_;
  const team::Team& team_;
  plans::Channels& channels_;
  team::Inquiries inquiries_;
  // Ranks of other nodes; with their numbers of calls.
  std::map<Rank, uint64_t> left_;
  std::map<Rank, team::Trouble> troubles_;
};

}  // namespace smddp::engine::health
