#include "engine/health/sentinel.h"

#include <algorithm>
#include <cstring>

#include "common/log.h"

namespace smddp::engine::health {
namespace {

// It may take so long until peers have been told of an error: connections may have to be made for it.
constexpr Nanoseconds kSpreading = 1'000'000'000;
// Stands between the first cause of an error and how it came to this group.
constexpr const char* kConsequence = "; because of that ";

// The head of an Abort; a text follows.
struct AbortHead {
  uint32_t kind = 0;
  int32_t lost = -1;
  int32_t noticedBy = -1;
};

// The numbers in `broken` come from another process, and may be invalid.
calls::Break checked(calls::Break broken, int numRanks) {
  const auto isRank = [&](Rank rank) { return rank >= 0 && rank < numRanks; };
  if (!isRank(broken.lost) || !isRank(broken.noticedBy)) broken.lost = broken.noticedBy = -1;
  broken.isHostSilent &= broken.lost >= 0;
  return broken;
}

}  // namespace

std::vector<std::byte> makeAbort(uint64_t group, const calls::Break& broken) {
  const AbortHead head{static_cast<uint32_t>(broken.cause.kind()), broken.lost, broken.noticedBy};
  std::string text(sizeof head, '\0');
  std::memcpy(text.data(), &head, sizeof head);
  return transport::makeAbort(group, broken.firstBroken, text + broken.cause.what());
}

Sentinel::Sentinel(process::Process& process, const team::Membership& membership, team::Team& team,
                   plans::Channels& channels, team::CallHistory& calls,
                   calls::EndedOperations& ended, observe::StatusBoard::Slot& status,
                   observe::Metrics::Group* metrics)
    : process_(process),
      membership_(membership),
      team_(team),
      channels_(channels),
      calls_(calls),
      ended_(ended),
      status_(status),
      diagnosis_(process, membership, team, channels),
      waits_(process, membership, team, diagnosis_, status, metrics) {}

// --- looking ----------------------------------------------------------------------------------------------

std::vector<calls::InFlight> Sentinel::inFlight() {
  std::vector<calls::InFlight> all;
  for (calls::Watched* watched : watched_) {
    auto some = watched->inFlight();
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  return all;
}

void Sentinel::checkHealth() {
  process_.ownership().assertOwned();
  if (hasLeft_) return;
  takeMatesBreaks();
  const auto waits = inFlight();
  waits_.follow(waits);
  const bool changed = checkLost(waits);
  checkDeadlines(changed ? inFlight() : waits);
}

// A lost rank is an error only where it is awaited: it may have done its part and left. True when anything changed.
bool Sentinel::checkLost(const std::vector<calls::InFlight>& inFlight) {
  const auto lostOf = [&](const calls::InFlight& at) -> std::optional<Rank> {
    if (at.awaitsAnyone) return diagnosis_.lostIfAllAre();
    const auto found = std::find_if(at.awaited.begin(), at.awaited.end(),
                                    [&](Rank rank) { return diagnosis_.isLostFor(at, rank); });
    return found == at.awaited.end() ? std::nullopt : std::optional(*found);
  };
  if (std::none_of(inFlight.begin(), inFlight.end(), lostOf)) return false;
  // Since we looked, more of what the lost rank sent before its end may have arrived, such as the reason why it left.
  bool advanced = takeMatesBreaks() || process_.poll() > 0;
  for (calls::Watched* watched : watched_) {
    advanced |= attempt(calls_.last() + 1, [&] { return watched->advance(); });
  }
  team_.bell().ring();
  if (advanced) return true;
  for (const calls::InFlight& at : this->inFlight()) {
    if (const auto lost = lostOf(at)) {
      breakGroup(lossOf(placeOf(at), *lost), Origin::Here);
    }
  }
  return true;
}

void Sentinel::checkDeadlines(const std::vector<calls::InFlight>& inFlight) {
  for (const calls::InFlight& at : inFlight) {
    if (at.expired) breakFrom(placeOf(at), timeout(at, *at.expired));
  }
}

Error Sentinel::timeout(const calls::InFlight& at, Nanoseconds waited) const {
  std::string culprit;
  if (!at.awaitsAnyone) {
    culprit = diagnosis_.culprit(diagnosis_.blameFor(at.awaited, at.sequence));
  } else {
    // It waits as long as somebody is left who could send, although the sender may be one of the lost.
    for (Rank rank = 0; rank < membership_.size(); ++rank) {
      if (rank == membership_.me() || !diagnosis_.isLost(rank)) continue;
      culprit += fmt::format("; {}", inWords(lossOf(at.sequence, rank)).what());
    }
  }
  return Error(ErrorKind::Timeout, fmt::format("Timed out after {:.1f} s, rank {} waits {}{}{}",
                                               static_cast<double>(waited) * 1e-9,
                                               membership_.jobRank(membership_.me()), at.wait,
                                               culprit, waits_.progressOf(at)));
}

void Sentinel::expire(const calls::Completion& completion, Nanoseconds waited) {
  process_.ownership().assertOwned();
  if (completion.done()) return;
  for (calls::Watched* watched : watched_) {
    if (const auto at = watched->inFlightOf(completion)) return fail(timeout(*at, waited));
  }
  // It ends with other operations, as a sum of sparse tensors does.
  const auto all = inFlight();
  if (!all.empty()) return fail(timeout(all.front(), waited));
  fail(Error(ErrorKind::Timeout,
             fmt::format("Timed out after {:.1f} s", static_cast<double>(waited) * 1e-9)));
}

std::optional<Error> Sentinel::howLost(Rank rank) {
  process_.ownership().assertOwned();
  if (diagnosis_.isLost(rank)) return inWords(lossOf(calls_.last() + 1, rank));
  if (process::Peer* peer = membership_.reachable(rank)) process_.peers().probeHost(*peer);
  return std::nullopt;
}

// --- breaking ---------------------------------------------------------------------------------------------

void Sentinel::fail(const Error& cause) {
  process_.ownership().assertOwned();
  if (checksMembers_) {
    // If a rank has died, its death is the cause, and `cause` a consequence.
    process_.peers().check();
    checkMembers();
  }
  uint64_t oldest = calls_.last() + 1;
  for (const calls::Watched* watched : watched_)
    oldest = std::min(oldest, watched->oldest().value_or(oldest));
  breakFrom(oldest, cause);
}

void Sentinel::onBreak(std::function<void(const Error&)> action) {
  process_.ownership().assertOwned();
  if (hasLeft_) return;
  if (broken_) {
    ended_.add([action = std::move(action), cause = broken_->cause] { action(cause); });
  } else {
    breakActions_.push_back(std::move(action));
  }
}

void Sentinel::watchMembers() {
  process_.ownership().assertOwned();
  checksMembers_ = true;
}

// A rank that leaves in order has done its part. Operations in flight are not ended: each finds out whether it needs
// the rank that died.
bool Sentinel::checkMembers() {
  process_.ownership().assertOwned();
  if (!checksMembers_ || hasLeft_ || broken_) return false;
  if (takeMatesBreaks()) return true;
  for (Rank rank = 0; rank < membership_.size(); ++rank) {
    const process::Peer* peer = membership_.peers[rank];
    if (peer == nullptr || !peer->died || !diagnosis_.isLost(rank)) continue;
    if (membership_.isMate(rank) && team_.hasLeft(rank)) continue;
    breakGroup(lossOf(calls_.last() + 1, rank), Origin::Here);
    return true;
  }
  return false;
}

calls::Break Sentinel::lossOf(uint64_t from, Rank lost) const {
  const process::Peer* const peer = membership_.peers[lost];
  const auto trouble = diagnosis_.troubleOf(lost);
  if (trouble && peer != nullptr && !peer->isHostSilent) {
    const std::string how = diagnosis_.howLost(lost);
    return {from,
            Error(ErrorKind::PeerLost, fmt::format("{}{}{} is gone: {}", *trouble, kConsequence,
                                                   membership_.nameOf(lost), how))};
  }
  return {from, Error(ErrorKind::PeerLost, diagnosis_.howLost(lost)), lost, membership_.me(),
          peer != nullptr && peer->isHostSilent};
}

// A rank that others have lost, and its mates, may know that it is alive. Then the text says who has given it up.
Error Sentinel::inWords(const calls::Break& broken) const {
  if (broken.lost < 0) return broken.cause;
  const bool isHere = broken.lost == membership_.me() ||
                      (membership_.isMate(broken.lost) && !diagnosis_.isLost(broken.lost));
  const std::string lost = membership_.nameOf(broken.lost);
  const std::string how = broken.cause.what();
  if (!isHere || broken.noticedBy < 0 || broken.noticedBy == membership_.me()) {
    return Error(broken.cause.kind(), fmt::format("{} is gone: {}", lost, how));
  }
  return Error(broken.cause.kind(),
               fmt::format("{} has given up {}, which is alive, and ended the group: {}",
                           membership_.nameOf(broken.noticedBy),
                           broken.lost == membership_.me() ? "this rank" : lost, how));
}

void Sentinel::breakGroup(const calls::Break& broken, Origin origin) {
  if (whyClosedFor(broken.firstBroken) != nullptr) return;
  // If a mate died, this process can see that before another host does, and inWords() must know it.
  if (broken.lost >= 0 && membership_.isMate(broken.lost)) process_.peers().check();
  const bool isFirst = whyClosed() == nullptr;
  forOthers_.emplace(broken);
  const ErrorKind kind = broken.cause.kind();
  if (origin == Origin::Here && (kind == ErrorKind::Resource || kind == ErrorKind::Internal)) {
    // Only this rank's text can leave out whose descriptors or memory it is about.
    forOthers_->cause = Error(
        kind, fmt::format("{}: {}", membership_.nameOf(membership_.me()), broken.cause.what()));
  }
  broken_.emplace(broken);
  broken_->cause = inWords(broken);
  const Error& cause = broken_->cause;
  for (auto& action : std::exchange(breakActions_, {})) {
    ended_.add([action = std::move(action), cause] { action(cause); });
  }
  // The error is logged here, and not where callers get it. Before they do, the process may be asked to end: torchrun
  // ends all ranks when it sees that one has died.
  if (isFirst && !(hasLeft_ && cause.kind() == ErrorKind::Aborted)) {
    const std::string text = fmt::format(
        "SMDDP{}: {}", toString(cause.kind()),
        membership_.failed(fmt::format("group \"{}\"", membership_.name), cause).what());
    if (process_.noteFailure(cause.what())) {
      SMDDP_LOG(Error, "engine", "{}", text);
    } else {
      SMDDP_LOG(Info, "engine", "{}", text);
    }
  }
  team_.publishBreak(*forOthers_);
  // A rank that receives the break tells no other node: we do, and a rank that waits for us asks (onInquiry).
  if (origin == Origin::Here) tellOtherNodes();
  if (broken.isHostSilent) giveUpNodeOf(broken.lost, broken.cause.what());
  for (calls::Watched* watched : watched_) watched->endBroken(*broken_);
}

void Sentinel::tellOfTrouble(const std::string& text) {
  process_.ownership().assertOwned();
  if (hasLeft_ || broken_) return;
  const team::Trouble trouble{calls_.last(), text.substr(0, text.find(kConsequence))};
  team_.publishTrouble(trouble);
  const auto message = team::makeTrouble(membership_.group, trouble);
  for (Rank rank = 0; rank < membership_.size(); ++rank) {
    if (membership_.reachable(rank) != nullptr) channels_.tell(rank, message);
  }
}

void Sentinel::tellOtherNodes() {
  const auto message = makeAbort(membership_.group, *forOthers_);
  for (Rank rank = 0; rank < membership_.size(); ++rank) {
    if (membership_.reachable(rank) == nullptr) continue;
    channels_.tell(rank, message);
    spreadingUntil_ = Deadline::after(process_.clock(), kSpreading);
  }
}

void Sentinel::giveUpNodeOf(Rank lost, const std::string& cause) {
  for (const Rank rank : membership_.topology.node(membership_.topology.nodeOf(lost))) {
    if (process::Peer* peer = membership_.reachable(rank)) process_.peers().giveUp(*peer, cause);
  }
}

bool Sentinel::takeMatesBreaks() {
  process_.ownership().assertOwned();
  bool heard = false;
  while (const auto broken = team_.nextBreak()) {
    breakGroup(checked(*broken, membership_.size()), Origin::Elsewhere);
    heard = true;
  }
  return heard;
}

// --- hearing ----------------------------------------------------------------------------------------------

bool Sentinel::onControl(Rank from, transport::Bytes message) {
  process_.ownership().assertOwned();
  if (const auto abort = transport::parseAbort(message)) {
    onAbort(*abort);
  } else if (const auto answer = team::parseAnswer(message)) {
    diagnosis_.onAnswer(from, answer->blame);
  } else if (const auto left = team::parseLeft(message)) {
    diagnosis_.onLeft(from, left->calls);
  } else if (auto trouble = team::parseTrouble(message)) {
    diagnosis_.onTrouble(from, {trouble->calls, printable(trouble->text)});
  } else if (const auto inquiry = team::parseInquiry(message)) {
    onInquiry(from, *inquiry);
  } else {
    return false;
  }
  return true;
}

void Sentinel::onAbort(const transport::ParsedAbort& abort) {
  AbortHead head;
  if (abort.text.size() <= sizeof head) return;
  std::memcpy(&head, abort.text.data(), sizeof head);
  const Error cause(calls::errorKindOf(head.kind), std::string(abort.text.substr(sizeof head)));
  breakGroup(checked({abort.from, cause, head.lost, head.noticedBy}, membership_.size()),
             Origin::Elsewhere);
}

void Sentinel::onInquiry(Rank from, const team::InquiryMessage& inquiry) {
  const uint64_t sequence = inquiry.sequence;
  const bool isMessage = sequence == 0;
  if (!isMessage) {
    attempt(sequence, [&] { calls_.onTold(from, sequence, inquiry.call); });
  }
  // Messages have no place in the order: any error ends them.
  if (hasLeft_ || (isMessage ? whyClosed() : whyClosedFor(sequence)) != nullptr)
    return channels_.tell(from, farewell());
  team::AnswerMessage answer;
  answer.group = membership_.group;
  const team::Blame late{membership_.me(), team::Blame::Why::NotCalled,
                         static_cast<uint32_t>(calls_.last())};
  answer.blame = (sequence > calls_.last() ? late : team_.blameOf(membership_.me())).pack();
  channels_.tell(from, transport::bytesOf(answer));
}

std::vector<std::byte> Sentinel::farewell() const {
  if (!left_) return makeAbort(membership_.group, *forOthers_);
  team::LeftMessage left;
  left.group = membership_.group;
  left.calls = calls_.last();
  const auto bytes = transport::bytesOf(left);
  return {bytes.begin(), bytes.end()};
}

// --- leaving ----------------------------------------------------------------------------------------------

void Sentinel::leave(bool isIdle, const char* how) {
  process_.ownership().assertOwned();
  if (hasLeft_) return;
  hasLeft_ = true;
  status_.end();
  breakActions_.clear();
  if (!isIdle) {
    fail(
        Error(ErrorKind::Aborted, fmt::format("{} {}", membership_.nameOf(membership_.me()), how)));
  }
  // Other ranks are not told: they may still use what we have sent.
  const uint64_t next = calls_.last() + 1;
  if (whyClosedFor(next) == nullptr) {
    left_.emplace(calls::Break{next, Error(ErrorKind::Usage, "the group has been destroyed")});
  }
  team_.publishLeft();
  channels_.close();
}

}  // namespace smddp::engine::health
