#include "engine/sentinel.h"

#include <algorithm>

#include "common/log.h"
#include "engine/call.h"

namespace smddp::engine {
namespace {

// How long it may take until peers have been told of an error: connections may have to be made for it.
constexpr Nanoseconds kSpreading = 1'000'000'000;
// Between two inquiries of one wait.
constexpr Nanoseconds kAskPeriod = 100'000'000;
// Waits are reported in the log after so long, when a rank is at fault that is stopped or does not answer …
constexpr Nanoseconds kReportStopped = 1'000'000'000;
// … and when it has not made the call yet.
constexpr Nanoseconds kReportLate = 10'000'000'000;

// An Abort's text begins with the kind of the error.
std::string encode(const Error& error) {
  return std::string(1, static_cast<char>('0' + static_cast<int>(error.kind()))) + error.what();
}

}  // namespace

Sentinel::Sentinel(Process& process, const Membership& membership, Team& team, Channels& channels,
                   CallHistory& calls, ContinuationQueue& continuations)
    : process_(process),
      membership_(membership),
      team_(team),
      channels_(channels),
      calls_(calls),
      continuations_(continuations),
      diagnosis_(process, membership, team, channels) {}

// --- looking ----------------------------------------------------------------------------------------------

std::vector<Standstill> Sentinel::standstills() {
  std::vector<Standstill> all;
  for (Watched* watched : watched_) {
    auto some = watched->standstills();
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  return all;
}

void Sentinel::checkHealth() {
  process_.ownership().assertOwned();
  if (left_) return;
  takeMatesBreaks();
  const auto waits = standstills();
  followUp(waits);
  const bool changed = checkLost(waits);
  checkDeadlines(changed ? standstills() : waits);
}

// Asks the awaited ranks, and lets mates know whom this rank blames.
void Sentinel::followUp(const std::vector<Standstill>& standstills) {
  Blame blame;
  std::set<Rank> all, senders;
  std::map<uint64_t, Wait> waits;
  for (const Standstill& at : standstills) {
    all.insert(at.awaited.begin(), at.awaited.end());
    if (at.sequence == 0) {
      senders.insert(at.awaited.begin(), at.awaited.end());
    } else {
      const auto known = waits_.find(at.sequence);
      Wait& wait = waits[at.sequence] =
          known != waits_.end() ? known->second : Wait{.since = process_.clock().now()};
      follow(wait, at);
    }
    if (!blame.definite()) blame = diagnosis_.blameFor(at.awaited, at.sequence);
  }
  waits_ = std::move(waits);
  if (process_.clock().now() - messagesAskedAt_ >= kAskPeriod) {
    messagesAskedAt_ = process_.clock().now();
    diagnosis_.inquire(senders, 0, {});
  }
  diagnosis_.keepOnly(all);
  team_.publishBlame(blame);
}

// Asks the awaited ranks, and says in the log which rank holds up an operation that has waited for long.
void Sentinel::follow(Wait& wait, const Standstill& at) {
  const Nanoseconds now = process_.clock().now();
  if (wait.askedAt == 0 || now - wait.askedAt >= kAskPeriod) {
    wait.askedAt = now;
    diagnosis_.inquire(at.awaited, at.sequence, at.call);
  }
  if (wait.isReported || now - wait.since < kReportStopped) return;
  const Blame blame = diagnosis_.blameFor(at.awaited, at.sequence);
  const bool isLate = blame.why == Blame::Why::NotCalled;
  if (!blame.definite() || (isLate && now - wait.since < kReportLate)) return;
  wait.isReported = true;
  SMDDP_LOG(Warn, "engine", "{} #{} (group \"{}\") has waited for {:.1f} s: {} {}",
            describe(at.call), at.sequence, membership_.name,
            static_cast<double>(now - wait.since) * 1e-9, membership_.nameOf(blame.rank),
            blame.describe());
}

// A lost rank is an error only where it is awaited: it may have done its part and left. True when anything changed.
bool Sentinel::checkLost(const std::vector<Standstill>& standstills) {
  const auto lostOf = [&](const Standstill& at) {
    const auto found = std::find_if(at.awaited.begin(), at.awaited.end(),
                                    [&](Rank rank) { return diagnosis_.isLost(rank); });
    return found == at.awaited.end() ? std::nullopt : std::optional(*found);
  };
  if (std::none_of(standstills.begin(), standstills.end(), lostOf)) return false;
  // What the lost rank still said, its reason for one, may have arrived since we looked at it.
  bool advanced = takeMatesBreaks() || process_.poll() > 0;
  for (Watched* watched : watched_) {
    advanced |= attempt(calls_.last() + 1, [&] { return watched->advance(); });
  }
  team_.bell().ring();
  if (advanced) return true;
  for (const Standstill& at : this->standstills()) {
    if (const auto lost = lostOf(at)) {
      breakFrom(placeOf(at), diagnosis_.lossOf(*lost), Origin::Here);
    }
  }
  return true;
}

void Sentinel::checkDeadlines(const std::vector<Standstill>& standstills) {
  for (const Standstill& at : standstills) {
    if (at.expired) breakFrom(placeOf(at), timeout(at, *at.expired), Origin::Here);
  }
}

Error Sentinel::timeout(const Standstill& at, Nanoseconds waited) const {
  const Blame blame = diagnosis_.blameFor(at.awaited, at.sequence);
  return Error(ErrorKind::Timeout, fmt::format("Timed out after {:.1f} s, rank {} waits {}{}",
                                               static_cast<double>(waited) * 1e-9, membership_.me(),
                                               at.wait, diagnosis_.culprit(blame)));
}

void Sentinel::expire(const Completion& completion, Nanoseconds waited) {
  process_.ownership().assertOwned();
  if (completion.done()) return;
  for (Watched* watched : watched_) {
    if (const auto at = watched->standstillOf(completion)) return fail(timeout(*at, waited));
  }
}

// --- breaking ---------------------------------------------------------------------------------------------

void Sentinel::fail(const Error& cause) {
  process_.ownership().assertOwned();
  if (checksMembers_) {
    // A rank's death is the cause of what it has led to elsewhere.
    process_.checkPeers();
    checkMembers();
  }
  uint64_t oldest = calls_.last() + 1;
  for (const Watched* watched : watched_)
    oldest = std::min(oldest, watched->oldest().value_or(oldest));
  breakFrom(oldest, cause, Origin::Here);
}

void Sentinel::onBreak(std::function<void(const Error&)> action) {
  process_.ownership().assertOwned();
  checksMembers_ = true;
  if (left_) return;
  if (broken_) {
    continuations_.add([action = std::move(action), cause = broken_->cause] { action(cause); });
  } else {
    breakActions_.push_back(std::move(action));
  }
}

// A rank that leaves in order has done its part. Operations in flight are not ended: each finds out whether it needs
// the rank that died.
bool Sentinel::checkMembers() {
  process_.ownership().assertOwned();
  if (!checksMembers_ || left_ || broken_) return false;
  if (takeMatesBreaks()) return true;
  for (Rank rank = 0; rank < membership_.size(); ++rank) {
    const Peer* peer = membership_.peers[rank];
    if (peer == nullptr || !peer->died || !diagnosis_.isLost(rank)) continue;
    if (membership_.isMate(rank) && team_.hasLeft(rank)) continue;
    breakFrom(calls_.last() + 1, diagnosis_.lossOf(rank), Origin::Here);
    return true;
  }
  return false;
}

void Sentinel::breakFrom(uint64_t from, const Error& cause, Origin origin) {
  if (isBroken(from)) return;
  broken_.emplace(Break{from, cause});
  for (auto& action : std::exchange(breakActions_, {})) {
    continuations_.add([action = std::move(action), cause] { action(cause); });
  }
  SMDDP_LOG(Debug, "engine", "group \"{}\" is broken from #{} on: {}", membership_.name, from,
            cause.what());
  team_.publishBreak(*broken_);
  // A rank that receives the break tells no other node: we do, and a rank that waits for us asks (onInquiry).
  if (origin == Origin::Here) tellOtherNodes();
  for (Watched* watched : watched_) watched->endFrom(*broken_);
}

void Sentinel::tellOtherNodes() {
  const auto message =
      transport::makeAbort(membership_.group, broken_->from, encode(broken_->cause));
  for (Rank rank = 0; rank < membership_.size(); ++rank) {
    if (membership_.reachable(rank) == nullptr) continue;
    channels_.control(rank, message);
    spreadingUntil_ = Deadline::after(process_.clock(), kSpreading);
  }
}

bool Sentinel::takeMatesBreaks() {
  process_.ownership().assertOwned();
  bool heard = false;
  while (const auto broken = team_.nextBreak()) {
    breakFrom(broken->from, broken->cause, Origin::Elsewhere);
    heard = true;
  }
  return heard;
}

// --- hearing ----------------------------------------------------------------------------------------------

bool Sentinel::onControl(Rank from, transport::Bytes message) {
  process_.ownership().assertOwned();
  if (const auto abort = transport::parseAbort(message)) {
    onAbort(*abort);
  } else if (const auto answer = parseAnswer(message)) {
    diagnosis_.onAnswer(from, answer->blame);
  } else if (const auto inquiry = parseInquiry(message)) {
    onInquiry(from, *inquiry);
  } else {
    return false;
  }
  return true;
}

void Sentinel::onAbort(const transport::ParsedAbort& abort) {
  if (abort.text.empty()) return;
  const Error cause(errorKindOf(static_cast<uint32_t>(abort.text.front() - '0')),
                    std::string(abort.text.substr(1)));
  breakFrom(abort.from, cause, Origin::Elsewhere);
}

void Sentinel::onInquiry(Rank from, const InquiryMessage& inquiry) {
  const uint64_t sequence = inquiry.sequence;
  const bool isMessage = sequence == 0;
  if (!isMessage) {
    attempt(sequence, [&] { calls_.onTold(from, sequence, inquiry.call); });
  }
  // Messages have no place in the order: any error ends them. But what we sent before we left still arrives.
  const bool leftInOrder = broken_ && broken_->cause.kind() == ErrorKind::Usage;
  if (isMessage ? broken_ && !leftInOrder : isBroken(sequence)) {
    const Error cause = leftInOrder ? diagnosis_.lossOf(membership_.me()) : broken_->cause;
    channels_.control(from, transport::makeAbort(membership_.group, broken_->from, encode(cause)));
    return;
  }
  AnswerMessage answer;
  answer.group = membership_.group;
  const Blame late{membership_.me(), Blame::Why::NotCalled, static_cast<uint32_t>(calls_.last())};
  answer.blame = (sequence > calls_.last() ? late : team_.blameOf(membership_.me())).pack();
  channels_.control(from, transport::bytesOf(answer));
}

// --- leaving ----------------------------------------------------------------------------------------------

void Sentinel::leave(bool isIdle) {
  process_.ownership().assertOwned();
  if (left_) return;
  left_ = true;
  breakActions_.clear();
  if (!isIdle) {
    fail(Error(ErrorKind::Aborted, fmt::format("rank {} left the group", membership_.me())));
  }
  // Later calls of this rank end with this error. Other ranks are not told: they may still use what we have sent.
  if (!isBroken(calls_.last() + 1)) {
    broken_.emplace(
        Break{calls_.last() + 1, Error(ErrorKind::Usage, "the group has been destroyed")});
  }
  team_.publishLeft();
  channels_.close();
}

}  // namespace smddp::engine
