// The ranks of a group, as a value.
//
// Team, channel keys, control messages and errors take from here which group this is, which ranks are in it and
// on which node each is. Nothing else keeps a copy.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bootstrap/introduction.h"
#include "common/error.h"
#include "engine/process/process.h"
#include "plan/topology.h"
#include "transport/channel.h"
#include "transport/wire.h"

namespace smddp::engine::team {

// The entry that a rank publishes of itself for one group (Introduction::group).
struct GroupEntry {
  uint64_t regionOffset = 0;  // the place of its region (region.h) in its slab
  uint64_t regionBytes = 0;
  uint64_t groupId = 0;          // rank 0's is the group's
  uint64_t algorithmDigest = 0;  // a digest of all that overrules the built-in table of algorithms

  std::vector<std::byte> encode() const;
  // Throws Transport when the bytes are no entry.
  static GroupEntry decode(const bootstrap::Introduction& introduction);
};

struct Membership {
  std::string name;
  bool ofCallbacks = false;  // GroupSpec
  uint64_t group = 0;        // the id of the group, which no other group of any process has
  plan::Topology topology;
  std::vector<process::Peer*> peers;  // by rank; null for this rank
  // By rank: the number by which users know it. The ranks of a group that is a part of the job have others there.
  std::vector<Rank> jobRanks;
  std::string self;  // this process, as Peer::describe() calls others

  Rank me() const { return topology.me(); }
  int size() const { return topology.numRanks(); }
  bool spansNodes() const { return topology.numNodes() > 1; }
  bool isMate(Rank rank) const {
    return rank != me() && topology.nodeOf(rank) == topology.myNode();
  }
  // The peer, if it is on another node and not known to be gone; else null.
  process::Peer* reachable(Rank rank) const;
  std::optional<Rank> rankOf(const process::Peer& peer) const;
  transport::ChannelKey channelKey(Rank source, Rank destination, uint8_t track,
                                   uint8_t subchannel) const {
    return {group, track, subchannel, source, destination};
  }

  // The number of a rank in each text for users. Accepts a number that is no rank, too.
  Rank jobRank(Rank rank) const { return bootstrap::jobRankOf(jobRanks, rank); }
  // True if the group's ranks have other numbers in the job.
  bool isPart() const;
  // "3" with the number in the job; "0, 3".
  std::string listOf(const std::set<Rank>& ranks) const;
  // "rank 3 (pid 40122 on ip-10-0-1-7)", with the number in the job.
  std::string nameOf(Rank rank) const;
  // engine::calls::describe(), whose root has the number in the job.
  std::string describe(const transport::CallFingerprint& call) const;
  // `cause` as the user reads it: "smddp: send (group "g") failed on rank 0/4: …" for `what` = "send (group "g")"; "on
  // rank 3 (1/2 of the group)" if the group is a part of the job. If callbacks make the group's calls, it says so.
  Error failed(const std::string& what, const Error& cause) const;
  // Throws Mismatch, which names both calls, unless they are the same.
  void requireSameCall(Rank rank, const transport::CallFingerprint& theirs,
                       const transport::CallFingerprint& mine) const;
};

}  // namespace smddp::engine::team
