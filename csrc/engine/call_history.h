// The collective calls of this rank, in order: their numbers, and what the last of them were.
//
// Ranks of one node compare their calls when they arrive. Those of other nodes, which may wait for a message that never
// comes, tell in an Inquiry (blame.h) which call they are in, and this is what it is compared with: with calls made
// already, or, when this rank is behind, with the call of that number as soon as it is made.
// Used by the thread that owns the engine.
#pragma once

#include <array>
#include <map>

#include "engine/completion.h"
#include "engine/membership.h"
#include "engine/team.h"
#include "transport/wire.h"

namespace smddp::engine {

class CallHistory {
 public:
  CallHistory(const Membership& membership, Team& team) : membership_(membership), team_(team) {}

  // The number of the last call; 0 before the first.
  uint64_t last() const { return last_; }
  // Numbers the next call. Mates see it from now on.
  uint64_t begin(Completion& completion) {
    completion.setSequence(++last_);
    team_.publishCalled(last_);
    return last_;
  }
  // What the call of this number is. Throws Mismatch when another rank has told that it is in another one.
  void record(uint64_t sequence, const transport::CallFingerprint& call) {
    calls_[sequence % calls_.size()] = call;
    for (const auto& [rank, told] : told_) {
      if (told.sequence == sequence) membership_.requireSameCall(rank, told.call, call);
    }
  }
  // A rank has told that its call of this number is `call`. Throws Mismatch when ours is another one.
  void onTold(Rank rank, uint64_t sequence, const transport::CallFingerprint& call) {
    if (sequence > last_) {
      told_[rank] = {sequence, call};
    } else if (sequence + calls_.size() > last_) {
      membership_.requireSameCall(rank, call, calls_[sequence % calls_.size()]);
    }
  }

 private:
  struct Told {
    uint64_t sequence;
    transport::CallFingerprint call;
  };

  const Membership& membership_;
  Team& team_;
  uint64_t last_ = 0;
  std::array<transport::CallFingerprint, 64> calls_{};  // call n at n % 64
  std::map<Rank, Told> told_;                           // by those who are ahead of this rank
};

}  // namespace smddp::engine
