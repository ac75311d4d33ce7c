// The collective calls of this rank, in order: their numbers, and what the last of them were.
//
// Ranks of one node compare their calls when they arrive. A rank of another node may wait for a message that never
// comes. It says in an Inquiry (blame.h) which call it is in. That call is compared with the one of the same number
// here: at once if this rank has made it, else as soon as it makes it.
// Used by the thread that owns the engine.
#pragma once

#include <array>
#include <map>

#include "engine/calls/completion.h"
#include "engine/observe/status_board.h"
#include "engine/team/membership.h"
#include "engine/team/team.h"
#include "transport/wire.h"

namespace smddp::engine::team {

class CallHistory {
 public:
  // The arguments outlive this object.
  CallHistory(const Membership& membership, Team& team, observe::StatusBoard::Slot& status)
      : membership_(membership), team_(team), status_(status) {}

  // The number of the last call; 0 before the first.
  uint64_t last() const { return last_; }
  // Numbers the next call. Mates see it from now on.
  uint64_t begin(calls::Completion& completion) {
    completion.setSequence(++last_);
    team_.publishCalled(last_);
    status_.setCalls(last_);
    return last_;
  }
  // Keeps what the call of this number is. Throws Mismatch if another rank has told that its call of this number
  // differs.
  void record(uint64_t sequence, const transport::CallFingerprint& call) {
    calls_[sequence % calls_.size()] = call;
    std::erase_if(told_, [&](const auto& entry) {
      const auto& [rank, told] = entry;
      if (told.sequence == sequence) membership_.requireSameCall(rank, told.call, call);
      return told.sequence <= sequence;
    });
  }
  // A rank tells that its call of this number is `call`. Throws Mismatch if ours differs.
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
  observe::StatusBoard::Slot& status_;
  uint64_t last_ = 0;
  std::array<transport::CallFingerprint, 64> calls_{};  // call n at n % 64
  std::map<Rank, Told> told_;                           // by ranks that are ahead of this one
};

}  // namespace smddp::engine::team
