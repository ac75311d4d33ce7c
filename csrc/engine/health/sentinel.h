// Checks the health of one group: deadlines, ranks that are gone or stopped, breaks that others report. Breaks the
// group when something is wrong, and leaves it in the end.
//
// The first error breaks the group for good, from the operation that met it on: that one and all later ones end with
// the error, on every rank, now or when they are called. Earlier operations run on: a rank that is done with them may
// have left for good, and others still take in what it sent.
//
// Knows what runs in the group only as Watched. Used by the thread that owns the engine.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "engine/calls/break.h"
#include "engine/calls/ended_operations.h"
#include "engine/calls/in_flight.h"
#include "engine/health/diagnosis.h"
#include "engine/health/waits.h"
#include "engine/observe/metrics.h"
#include "engine/observe/status_board.h"
#include "engine/plans/channels.h"
#include "engine/team/call_history.h"
#include "engine/team/membership.h"
#include "engine/team/team.h"

namespace smddp::engine::health {

// The message that ends a group on other ranks, with the error of `broken`.
std::vector<std::byte> makeAbort(uint64_t group, const calls::Break& broken);

class Sentinel {
 public:
  // The arguments outlive the sentinel; `metrics` may be null.
  Sentinel(process::Process& process, const team::Membership& membership, team::Team& team,
           plans::Channels& channels, team::CallHistory& calls, calls::EndedOperations& ended,
           observe::StatusBoard::Slot& status, observe::Metrics::Group* metrics);
  // Takes what the sentinel watches. Call it before anything runs in the group.
  void attach(calls::Watched& operations, calls::Watched& messages) {
    watched_ = {&operations, &messages};
  }

  // Why the group takes no more calls, or none from some number on: the error that broke it, or that this rank has left
  // it. Null: it takes calls. The cause is worded for this rank.
  const calls::Break* whyClosed() const { return broken_ ? &*broken_ : left_ ? &*left_ : nullptr; }
  // The break with which the call of this number ends; null if it runs.
  const calls::Break* whyClosedFor(uint64_t sequence) const {
    if (broken_ && broken_->concerns(sequence)) return &*broken_;
    return left_ && left_->concerns(sequence) ? &*left_ : nullptr;
  }
  // Runs `step`; what it throws breaks the group from operation `from` on. True if `step` returned true or threw:
  // something has changed.
  template <typename Step>
  bool attempt(uint64_t from, Step step);
  // Takes over breaks that mates have published; true when there was any.
  bool takeMatesBreaks();
  // Looks at deadlines, mates and ranks of other nodes; see Progress::checkHealth().
  void checkHealth();
  // False when the message is not for the sentinel.
  bool onControl(Rank from, transport::Bytes message);
  // A caller no longer waits for this operation: breaks the group, unless the operation has ended.
  void expire(const calls::Completion& completion, Nanoseconds waited);
  // Another group of this process has failed. Tells the ranks of this one, in case this rank leaves because of that.
  void tellOfTrouble(const std::string& text);
  // Breaks the group from the oldest operation in flight on.
  void fail(const Error& cause);
  // The error that says how `rank` was lost. If it was not lost, probes its host.
  std::optional<Error> howLost(Rank rank);

  // `action` runs with the first error that breaks the group, as a continuation, unless this rank leaves before.
  void onBreak(std::function<void(const Error&)> action);
  // From now on a rank that dies breaks the group, awaited or not.
  void watchMembers();
  // Looks for such ranks, also while the group is idle; true when the group has been broken. Does nothing before
  // watchMembers().
  bool checkMembers();

  // This rank makes no more calls. If something is in flight, this breaks the group, with
  // an error that says that this rank `how`.
  void leave(bool isIdle, const char* how);
  // The answer to ranks of other nodes that wait for this one, which has left or knows that the group is broken.
  std::vector<std::byte> farewell() const;
  // After an error the network must be polled for a while, or the others might not hear of it.
  bool isSpreading() const { return broken_ && !spreadingUntil_.passed(process_.clock()); }

 private:
  enum class Origin { Here, Elsewhere };

  void breakFrom(uint64_t from, const Error& cause) { breakGroup({from, cause}, Origin::Here); }
  calls::Break lossOf(uint64_t from, Rank lost) const;
  // Breaks the group, unless it is broken from an operation at or before this one: publishes the break to mates, tells
  // other nodes if it was found Here, ends what it concerns.
  void breakGroup(const calls::Break& broken, Origin origin);
  Error inWords(const calls::Break& broken) const;
  void tellOtherNodes();
  // The lost rank's host is silent. Gives up all ranks of that node, so that they learn why this rank ends the group,
  // and do not believe that it left in order.
  void giveUpNodeOf(Rank lost, const std::string& cause);
  std::vector<calls::InFlight> inFlight();
  bool checkLost(const std::vector<calls::InFlight>& inFlight);
  void checkDeadlines(const std::vector<calls::InFlight>& inFlight);
  Error timeout(const calls::InFlight& at, Nanoseconds waited) const;
  void onAbort(const transport::ParsedAbort& abort);
  void onInquiry(Rank from, const team::InquiryMessage& inquiry);
  // From which operation on its error breaks the group. A message has no place in the order of operations, so with it
  // that is the next call.
  uint64_t placeOf(const calls::InFlight& at) const {
    return at.sequence > 0 ? at.sequence : calls_.last() + 1;
  }

  process::Process& process_;
  const team::Membership& membership_;
  team::Team& team_;
  plans::Channels& channels_;
  team::CallHistory& calls_;
  calls::EndedOperations& ended_;
  observe::StatusBoard::Slot& status_;
  Diagnosis diagnosis_;
  Waits waits_;
  std::array<calls::Watched*, 2> watched_{};
  std::optional<calls::Break> broken_;     // the error that broke the group, worded for this rank
  std::optional<calls::Break> forOthers_;  // the same break, in the words for other ranks
  std::optional<calls::Break> left_;  // this rank has left in order: the error of its later calls
  Deadline spreadingUntil_{0};
  bool checksMembers_ = false;
  std::vector<std::function<void(const Error&)>> breakActions_;  // until the group is broken
  bool hasLeft_ = false;                                         // in order, or because of an error
};

template <typename Step>
bool Sentinel::attempt(uint64_t from, Step step) {
  try {
    if constexpr (std::is_void_v<decltype(step())>) {
      step();
      return false;
    } else {
      return step();
    }
  } catch (const Error& error) {
    breakFrom(from, error);
  } catch (const std::exception& error) {
    breakFrom(from, Error(ErrorKind::Internal, error.what()));
  }
  return true;
}

}  // namespace smddp::engine::health
