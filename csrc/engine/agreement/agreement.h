// The agreement of processes on who the members of their group are, after some have died or newcomers wait, and on how
// many training steps count.
//
// A *generation* is a list of members. Each member runs one Agreement. When its group has failed, it asks all others to
// agree (Revoke). The first member that nobody suspects leads: it collects what each member that is left knows
// (Promise), decides on the next generation, has all of them accept it (Accept, Accepted), and tells it (Commit). If
// the leader is lost, the next one leads under a higher ballot, and keeps to what has been accepted: this is Paxos,
// with all members that are left in place of a majority, so that a job of two can go on as one. What makes that safe:
//
//   - *Dead* is known, *silent* is only suspected, and never becomes known. A job goes on if every missing member is
//     dead. If not, it needs more than half of the members, or half of them with the first one. So two parts of a job
//     that cannot hear one another never both go on.
//   - The step that counts is the last one that all who are there have voted for, or that one of them has committed: a
//     member that is cut off may have committed (and saved) a step, and then all of the others have voted for it.
//   - Newcomers come in a generation of their own, without losses. Their wishes end with each generation, so one that
//     has died does not start agreements for ever.
//
// tests/cpp/engine/agreement/agreement_test.cc simulates jobs with deaths, silent hosts and stopped processes.
//
// Pure: no clock, no input or output, no threads. Whoever drives it passes what has happened, then sends
// takeOutgoing() and looks at state().
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"

namespace smddp::engine::agreement {

using MemberId = uint64_t;  // of a process, never used twice

struct Member {
  MemberId id = 0;
  std::string card;  // how others reach it
  bool operator==(const Member&) const = default;
};

struct Generation {
  uint64_t number = 0;          // 1, 2, …; 0: none
  std::vector<Member> members;  // in the order of ranks
  int64_t step = 0;             // how many steps count
  const Member* find(MemberId id) const;
  bool operator==(const Generation&) const = default;
};

enum class Suspicion : uint8_t { Silent, Dead };
using Suspects = std::map<MemberId, Suspicion>;

// Of two attempts to lead, the higher one counts.
struct Ballot {
  uint32_t attempt = 0;
  MemberId leader = 0;
  auto operator<=>(const Ballot&) const = default;
};

struct Message {
  enum class Kind : uint8_t {
    Revoke,   // the generation has ended: suspects, newcomers
    Prepare,  // the leader asks: ballot; decided: the generation that it ends
    Promise,  // ballot, suspects, newcomers, committed, voted; acceptedBallot and decided, if one was accepted
    Refused,   // in place of Promise: ballot: a higher one that was promised before
    Accept,    // ballot; decided: the next generation
    Accepted,  // ballot
    Commit,    // decided: the next generation
    Current,  // an answer to a member that is behind: decided: the generation that the sender is in
    Minority,  // the leader tells that too few are there
  };
  Kind kind = Kind::Revoke;
  uint64_t generation = 0;  // that the sender is in
  Ballot ballot{};
  Suspects suspects{};
  std::vector<Member> newcomers{};
  int64_t committed = 0;
  int64_t voted = 0;
  Ballot acceptedBallot{};
  Generation decided{};
};

// The rules, so that the simulator can show what each is for. All others use the defaults.
struct Rules {
  Nanoseconds grace =
      9'000'000'000;  // how long a part that may be the smaller one waits for news of the others
  Nanoseconds retry =
      100'000'000;  // the pause before messages are sent again; it doubles up to longestRetry
  Nanoseconds longestRetry = 1'000'000'000;
  // For the simulator only: what goes wrong without a rule.
  bool ignoresTheDead = false;       // who is certainly dead does not count among the members
  bool ignoresAccepted = false;      // a new leader does not ask what has been accepted
  bool acceptsOldBallots = false;    // also after it has promised a higher one
  bool takesHighestStep = false;     // the highest committed step counts, whoever has voted
  bool silenceBecomesDeath = false;  // a member that was silent may count as dead later
  bool keepsKnocks = false;          // newcomers' wishes outlive a generation
  bool needsNoFirst = false;         // half of the members may go on without the first one
  bool commitsWithoutAll = false;    // the leader waits for one answer less
};

class Agreement {
 public:
  enum class State {
    Working,   // there is a generation, and nothing to agree on
    Agreeing,  // also: a newcomer that waits
    Out,       // this process is no member any more; whyOut()
  };

  Agreement(Member me, const Rules& rules) : me_(std::move(me)), rules_(rules) {}
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

  // The first generation; all its members call this with the same one.
  void begin(Generation first);
  // This process is none of the members yet, and waits until it is.
  void awaitFirst() { state_ = State::Agreeing; }
  // A process wants to become a member. The members have to be told of it in time: start() then lets it in.
  void hear(const Member& newcomer) { addNewcomers({newcomer}); }
  // The last step that this member has committed, and the last one that it has voted for. Before start().
  void setProgress(int64_t committed, int64_t voted);
  // The group has failed, or newcomers wait: the generation ends.
  void start(Nanoseconds now);
  // It cannot be heard any more, or is dead. Also of newcomers.
  void suspect(MemberId who, Suspicion how, Nanoseconds now);
  void onMessage(MemberId from, const Message& message, Nanoseconds now);
  // Time passes: call it every few milliseconds while agreeing.
  void tick(Nanoseconds now);

  struct Outgoing {
    Member to;
    Message message;
  };
  std::vector<Outgoing> takeOutgoing() { return std::exchange(outgoing_, {}); }
  State state() const { return state_; }
  const std::string& whyOut() const { return whyOut_; }
  const Generation& current() const { return current_; }
  size_t numNewcomers() const { return newcomers_.size(); }
  const Suspects& suspects() const { return suspects_; }
  // When tick() has something to do; while agreeing.
  Nanoseconds nextTick() const { return nextRetry_; }
  // On whom this one waits, for an error text.
  std::vector<MemberId> awaited() const;

 private:
  struct Promise {
    Suspects suspects;
    std::optional<std::pair<Ballot, Generation>> accepted;
    int64_t committed;
    int64_t voted;
  };
  bool isMember(MemberId id) const { return current_.find(id) != nullptr; }
  void send(const Member& to, Message message);
  void sendToOthers(const Message& message);
  void enter(Nanoseconds now);
  void revoke(Nanoseconds now);
  void lead();
  void stopLeading();
  void decide(Nanoseconds now);
  bool mayGoOn(const std::set<MemberId>& present, const Suspects& known) const;
  std::set<MemberId> thoseWhoHearOneAnother() const;
  void addNewcomers(const std::vector<Member>& newcomers);
  // Takes what somebody says has been decided.
  void learn(const Generation& decided, Nanoseconds now);
  void install(const Generation& next, Nanoseconds now);
  void leave(std::string why);

  const Member me_;
  const Rules rules_;
  State state_ = State::Working;
  std::string whyOut_;
  Generation current_;
  Suspects suspects_;
  std::map<MemberId, Member> newcomers_;
  int64_t committed_ = 0, voted_ = 0;
  Nanoseconds agreeingSince_ = 0, nextRetry_ = 0, pause_ = 0;
  // As a member.
  Ballot promised_{};
  std::optional<std::pair<Ballot, Generation>> accepted_;
  // As the leader.
  std::optional<Ballot> ballot_;
  std::set<MemberId> asked_;
  std::map<MemberId, Promise> promises_;
  std::optional<Generation> proposed_;
  std::set<MemberId> accepters_;
  std::vector<Outgoing> outgoing_;
};

}  // namespace smddp::engine::agreement
