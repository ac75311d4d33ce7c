// The ranks of this node in one group: what they tell one another in shared memory.
//
// Each rank has a region (region.h) that only it writes. This class writes ours and is, with Track, the only code that
// reads those of our mates. A mate may write anything at any time. So a word of it is copied with one atomic load, and
// only the copy is checked and used. (A break record is copied without atomic loads, once its mate has published it;
// Sentinel checks the copy.)
//
// This rank's region is an OwnRegion. Used by the thread that owns the engine.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "engine/calls/break.h"
#include "engine/memory/region.h"
#include "engine/process/process.h"
#include "engine/team/blame.h"
#include "engine/team/membership.h"
#include "engine/team/own_region.h"
#include "engine/team/team_bell.h"
#include "engine/team/track.h"

namespace smddp::engine::team {

// The data that a rank publishes for its mates when it arrives at an execution (Arrival has it in shared memory).
struct Descriptor {
  transport::CallFingerprint fingerprint;
  // The ends of the bytes of each request that could be fused; empty when there is one request only.
  std::span<const uint32_t> ends;
  // The places of its buffers in communication memory. Null: they are private, or the choice of the plan does not
  // depend on that.
  const memory::BufferLocations* buffers = nullptr;
  bool isNear = false;  // this rank's slots lie beside its arrival record
};

// The decisions that all ranks of a node make alike once all have arrived.
struct Agreement {
  // Requests that run as one execution: as many as the rank with the fewest has.
  uint32_t fused = 1;
  bool shared = true;  // all ranks' buffers lie in communication memory
  // At least one rank has shared buffers and copied nothing before the arrival. So the plan must not need such a copy.
  bool afterArrival = false;
};

class Team {
 public:
  // Finds the regions of the mates; `entries` by rank. Throws Mismatch when one does not fit. `process` and
  // `membership` outlive the team.
  Team(process::Process& process, const Membership& membership, std::shared_ptr<OwnRegion> region,
       const std::vector<GroupEntry>& entries);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  Track makeTrack(int64_t index) const;
  TeamBell& bell() { return bell_; }

  // --- executions -----------------------------------------------------------------------------------------

  // Writes what mates read when this rank has arrived at the track's execution.
  void publish(const Track& track, const Descriptor& descriptor);
  void arrive(Track& track) {
    track.arrive(topology().myLocal());
    bell_.signalled();
  }
  bool allArrived(const Track& track) const;
  std::set<Rank> absent(const Track& track) const;
  // When all have arrived. Throws Mismatch when a mate makes another call.
  Agreement agree(const Track& track) const;
  // The buffers of a mate, mapped here, when all are shared; null for 0 bytes. Throws Mismatch for addresses that the
  // mate does not have.
  std::byte* inputOf(const Track& track, int local, int64_t bytes) const;
  std::byte* outputOf(const Track& track, int local, int64_t bytes) const;
  // Backs as much of this rank's current half as a plan needs. If the plan sends from there, registers it with the
  // network.
  void prepareStaging(Track& track, size_t bytes, bool isSent);

  // --- state of the group ---------------------------------------------------------------------------------

  // The number of the collective call that this rank has made last, and that of a mate.
  void publishCalled(uint64_t sequence);
  uint64_t calledBy(Rank mate) const;
  // Tells mates which rank this one blames for its wait (blame.h).
  void publishBlame(const Blame& blame);
  void clearBlame();
  Blame blameOf(Rank member) const;
  void publishBreak(const calls::Break& broken);
  // The next break that a mate has published and that was not read yet.
  std::optional<calls::Break> nextBreak();
  // Publishes the first trouble; later ones are dropped.
  void publishTrouble(const Trouble& trouble);
  // Returns the trouble of a mate that has made no call since.
  std::optional<Trouble> troubleOf(Rank mate) const;
  void publishLeft();
  bool hasLeft(Rank mate) const;
  // True if the mate may still use the group's memory. (It no longer does if its region belongs to another group by
  // now, which can be so once it saw us leave.)
  bool mayUseMemory(Rank mate) const;
  // No mate can touch this rank's region any more, so it may be given back.
  void allowGiveBack() { region_->allowGiveBack(); }

 private:
  struct Member {
    memory::RegionHeader* region = nullptr;
    uint64_t group = 0;       // RegionHeader::group, until the mate gives the region up
    uint32_t breaksRead = 0;  // how many of RegionHeader::breaks have been read
  };

  const plan::Topology& topology() const { return membership_.topology; }
  const Member& member(Rank rank) const { return members_[topology().localOf(rank)]; }
  std::byte* checkedRegion(Rank rank, const GroupEntry& entry) const;
  std::byte* resolve(int local, transport::shm::Location& at, int64_t bytes) const;

  process::Process& process_;
  const Membership& membership_;
  const std::shared_ptr<OwnRegion> region_;
  memory::RegionHeader& mine_;   // the header of region_
  std::vector<Member> members_;  // by local index, this rank included
  TeamBell bell_;
};

}  // namespace smddp::engine::team
