#include "engine/agreement/agreement.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace smddp::engine::agreement {

using Kind = Message::Kind;

namespace {

std::vector<Member> membersIn(const std::map<MemberId, Member>& byId) {
  std::vector<Member> members;
  for (const auto& [id, member] : byId) members.push_back(member);
  return members;
}

}  // namespace

const Member* Generation::find(MemberId id) const {
  const auto found = std::ranges::find(members, id, &Member::id);
  return found == members.end() ? nullptr : &*found;
}

void Agreement::begin(Generation first) {
  committed_ = voted_ = first.step;
  current_ = std::move(first);
}

void Agreement::setProgress(int64_t committed, int64_t voted) {
  committed_ = committed;
  voted_ = voted;
}

void Agreement::start(Nanoseconds now) {
  if (state_ == State::Working) revoke(now);
}

void Agreement::suspect(MemberId who, Suspicion how, Nanoseconds now) {
  if (state_ == State::Out || who == me_.id) return;
  const auto known = suspects_.find(who);
  if (known != suspects_.end()) {
    if (known->second == how || how == Suspicion::Silent || !rules_.silenceBecomesDeath) return;
    known->second = how;
  } else {
    suspects_.emplace(who, how);
  }
  newcomers_.erase(who);
  if (isMember(who)) revoke(now);
}

void Agreement::tick(Nanoseconds now) {
  if (state_ != State::Agreeing || current_.number == 0 || now < nextRetry_) return;
  nextRetry_ = now + pause_;
  pause_ = std::min(2 * pause_, rules_.longestRetry);
  revoke(now);
}

void Agreement::onMessage(MemberId from, const Message& message, Nanoseconds now) {
  if (state_ == State::Out) return;
  // What comes from a member that is suspected does not count: it gets no answer either, and others may have gone on
  // without it.
  if (from != me_.id && suspects_.contains(from) && isMember(from)) return;
  switch (message.kind) {
    case Kind::Commit:
    case Kind::Current: return learn(message.decided, now);
    case Kind::Prepare: learn(message.decided, now); break;
    default: break;
  }
  if (current_.number == 0 || state_ == State::Out || message.generation > current_.number) return;
  if (message.generation < current_.number) {
    if (message.kind != Kind::Revoke && message.kind != Kind::Prepare) return;
    // Only the leader of this generation has told it, and may have died meanwhile.
    return send({from, {}}, {.kind = Kind::Current, .decided = current_});
  }
  switch (message.kind) {
    case Kind::Revoke: {
      for (const auto& [who, how] : message.suspects) {
        if (how == Suspicion::Dead && who != me_.id) suspects_.emplace(who, how);
      }
      addNewcomers(message.newcomers);
      return start(now);
    }
    case Kind::Prepare: {
      if (message.ballot < promised_) {
        return send({from, {}}, {.kind = Kind::Refused, .ballot = promised_});
      }
      enter(now);
      promised_ = message.ballot;
      Message promise{.kind = Kind::Promise,
                      .ballot = message.ballot,
                      .suspects = suspects_,
                      .newcomers = membersIn(newcomers_),
                      .committed = committed_,
                      .voted = voted_};
      if (accepted_) std::tie(promise.acceptedBallot, promise.decided) = *accepted_;
      return send({from, {}}, std::move(promise));
    }
    case Kind::Promise: {
      if (message.ballot != ballot_ || proposed_) return;
      Promise& promise = promises_[from];
      promise = {message.suspects, std::nullopt, message.committed, message.voted};
      if (message.decided.number > 0) {
        promise.accepted.emplace(message.acceptedBallot, message.decided);
      }
      addNewcomers(message.newcomers);
      return decide(now);
    }
    // The next attempt will be higher. Not at once: two leaders would hinder each other for ever.
    case Kind::Refused: promised_ = std::max(promised_, message.ballot); return;
    case Kind::Accept: {
      if (message.ballot < promised_ && !rules_.acceptsOldBallots) return;
      enter(now);
      promised_ = message.ballot;
      accepted_.emplace(message.ballot, message.decided);
      return send({from, {}}, {.kind = Kind::Accepted, .ballot = message.ballot});
    }
    case Kind::Accepted: {
      if (message.ballot != ballot_ || !proposed_) return;
      accepters_.insert(from);
      const size_t needed = asked_.size() - (rules_.commitsWithoutAll && asked_.size() > 1 ? 1 : 0);
      if (accepters_.size() < needed) return;
      const Generation next = *proposed_;
      // Also those that are out. A newcomer has not been a member.
      sendToOthers({.kind = Kind::Commit, .decided = next});
      for (const Member& member : next.members) {
        if (!isMember(member.id)) send(member, {.kind = Kind::Commit, .decided = next});
      }
      return install(next, now);
    }
    case Kind::Minority:
      if (state_ == State::Agreeing) {
        leave("it and those that it hears may be the smaller part of the job");
      }
      return;
    default: return;
  }
}

std::vector<MemberId> Agreement::awaited() const {
  std::vector<MemberId> ids;
  if (proposed_) {
    std::ranges::set_difference(asked_, accepters_, std::back_inserter(ids));
  } else if (ballot_) {
    for (const MemberId id : asked_) {
      if (!promises_.contains(id)) ids.push_back(id);
    }
  } else {
    for (const Member& member : current_.members) {
      if (suspects_.contains(member.id)) continue;
      ids.push_back(member.id);
      break;
    }
  }
  return ids;
}

void Agreement::send(const Member& to, Message message) {
  message.generation = current_.number;
  const Member* known = current_.find(to.id);
  outgoing_.push_back({known == nullptr ? to : *known, std::move(message)});
}

void Agreement::sendToOthers(const Message& message) {
  for (const Member& member : current_.members) {
    if (member.id != me_.id) send(member, message);
  }
}

void Agreement::enter(Nanoseconds now) {
  if (state_ != State::Working) return;
  state_ = State::Agreeing;
  agreeingSince_ = now;
  pause_ = rules_.retry;
  nextRetry_ = now + pause_;
}

void Agreement::revoke(Nanoseconds now) {
  enter(now);
  Message message{.kind = Kind::Revoke, .newcomers = membersIn(newcomers_)};
  for (const auto& [who, how] : suspects_) {
    if (how == Suspicion::Dead) message.suspects.emplace(who, how);
  }
  sendToOthers(message);
  lead();
}

// Begins a new ballot, if this is the first member that is not suspected.
void Agreement::lead() {
  asked_.clear();
  for (const Member& member : current_.members) {
    if (!suspects_.contains(member.id)) asked_.insert(member.id);
  }
  const auto first = std::ranges::find_if(
      current_.members, [&](const Member& member) { return asked_.contains(member.id); });
  stopLeading();
  if (first->id != me_.id) return;
  ballot_ = Ballot{promised_.attempt + 1, me_.id};
  promised_ = {promised_.attempt + 1, 0};  // the next ballot of this leader is higher, too
  for (const Member& member : current_.members) {
    if (!asked_.contains(member.id)) continue;
    send(member, {.kind = Kind::Prepare, .ballot = *ballot_, .decided = current_});
  }
}

void Agreement::stopLeading() {
  ballot_.reset();
  proposed_.reset();
  promises_.clear();
  accepters_.clear();
}

// Those of whom none is suspected by another one. The member that most others suspect goes first; of two, the last.
std::set<MemberId> Agreement::thoseWhoHearOneAnother() const {
  std::set<MemberId> present = asked_;
  for (;;) {
    MemberId worst = 0;
    size_t most = 0;
    for (const Member& member : current_.members) {
      if (!present.contains(member.id)) continue;
      const auto suspectsIt = [&](MemberId other) {
        return other != member.id && promises_.at(other).suspects.contains(member.id);
      };
      const auto count = static_cast<size_t>(std::ranges::count_if(present, suspectsIt));
      if (count > 0 && count >= most) std::tie(worst, most) = std::pair(member.id, count);
    }
    if (most == 0) return present;
    present.erase(worst);
    // Somebody else will lead, when he no longer waits for this one.
    if (worst == me_.id) return present;
  }
}

bool Agreement::mayGoOn(const std::set<MemberId>& present, const Suspects& known) const {
  size_t size = 0, unsure = 0;
  for (const Member& member : current_.members) {
    const auto found = known.find(member.id);
    const bool isDead = found != known.end() && found->second == Suspicion::Dead;
    if (!present.contains(member.id) && !isDead) ++unsure;
    if (rules_.ignoresTheDead && isDead && !present.contains(member.id)) continue;
    ++size;
  }
  const bool hasFirst = present.contains(current_.members.front().id) || rules_.needsNoFirst ||
                        (rules_.ignoresTheDead && known.contains(current_.members.front().id));
  return unsure == 0 || 2 * present.size() > size || (2 * present.size() == size && hasFirst);
}

void Agreement::decide(Nanoseconds now) {
  if (promises_.size() < asked_.size()) return;
  const std::set<MemberId> present = thoseWhoHearOneAnother();
  if (!present.contains(me_.id)) return;
  Suspects known;
  for (const MemberId id : present) {
    for (const auto& [who, how] : promises_.at(id).suspects) {
      auto& worse = known.emplace(who, how).first->second;
      worse = std::max(worse, how);
    }
  }
  if (!mayGoOn(present, known)) {
    if (now - agreeingSince_ <= rules_.grace) return;
    for (const MemberId id : present) {
      send({id, {}}, {.kind = Kind::Minority});
    }
    return;
  }
  Generation next{current_.number + 1, {}, 0};
  int64_t committed = 0;
  int64_t voted = INT64_MAX;
  Ballot highest{};
  const Generation* before = nullptr;
  for (const MemberId id : present) {
    const Promise& promise = promises_.at(id);
    committed = std::max(committed, promise.committed);
    voted = std::min(voted, promise.voted);
    if (promise.accepted && !(promise.accepted->first < highest)) {
      highest = promise.accepted->first;
      before = &promise.accepted->second;
    }
  }
  for (const Member& member : current_.members) {
    if (present.contains(member.id)) next.members.push_back(member);
  }
  if (present.size() == current_.members.size()) {
    std::ranges::copy(membersIn(newcomers_), std::back_inserter(next.members));
  }
  next.step = rules_.takesHighestStep ? committed : std::max(committed, voted);
  if (before != nullptr && !rules_.ignoresAccepted) next = *before;
  asked_ = present;
  proposed_ = next;
  for (const MemberId id : present) {
    send({id, {}}, {.kind = Kind::Accept, .ballot = *ballot_, .decided = next});
  }
}

void Agreement::addNewcomers(const std::vector<Member>& newcomers) {
  for (const Member& newcomer : newcomers) {
    if (!isMember(newcomer.id) && !suspects_.contains(newcomer.id)) {
      newcomers_.emplace(newcomer.id, newcomer);
    }
  }
}

void Agreement::learn(const Generation& decided, Nanoseconds now) {
  // A member misses at most one generation: it was asked before the one after that could be decided.
  const bool isNext = current_.number > 0 && decided.number == current_.number + 1;
  const bool letsIn = current_.number == 0 && decided.find(me_.id) != nullptr;
  if (isNext || letsIn) {
    install(decided, now);
  } else if (current_.number > 0 && decided.number > current_.number) {
    leave("the others have gone on without it");
  }
}

void Agreement::install(const Generation& next, Nanoseconds now) {
  if (next.find(me_.id) == nullptr) return leave("the others have gone on without it");
  current_ = next;
  committed_ = voted_ = next.step;
  promised_ = {};
  accepted_.reset();
  stopLeading();
  if (!rules_.keepsKnocks) newcomers_.clear();
  for (const Member& member : current_.members) newcomers_.erase(member.id);
  state_ = State::Working;
  const auto isSuspected = [&](const Member& member) { return suspects_.contains(member.id); };
  if (std::ranges::any_of(current_.members, isSuspected)) revoke(now);
}

void Agreement::leave(std::string why) {
  state_ = State::Out;
  whyOut_ = std::move(why);
}

}  // namespace smddp::engine::agreement
