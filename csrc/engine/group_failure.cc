// How a group finds out that something is wrong, and how it ends: the slow half of group.h.
#include <algorithm>
#include <cstring>

#include "common/log.h"
#include "engine/call.h"
#include "engine/group.h"

namespace smddp::engine {
namespace {

// How long it may take until peers have been told of an error: connections may have to be made for it.
constexpr Nanoseconds kSpreading = 1'000'000'000;
// Between two inquiries of one wait.
constexpr Nanoseconds kAskPeriod = 100'000'000;
// Waits are reported in the log after so long, when somebody is to blame who cannot help it …
constexpr Nanoseconds kReportStopped = 1'000'000'000;
// … and when somebody is merely late.
constexpr Nanoseconds kReportLate = 10'000'000'000;
// The end of a remote process may be known before its last bytes are here.
constexpr Nanoseconds kLastBytes = 10'000'000;

std::string list(const std::set<Rank>& ranks) {
  std::string text;
  for (const Rank r : ranks) text += fmt::format("{}{}", text.empty() ? "" : ", ", r);
  return text;
}

// An Abort's text begins with the kind of the error.
std::string encode(const Error& error) {
  return std::string(1, static_cast<char>('0' + static_cast<int>(error.kind()))) + error.what();
}

Error decode(uint32_t kind, std::string text) {
  const auto last = static_cast<uint32_t>(ErrorKind::Internal);
  return Error(kind <= last ? static_cast<ErrorKind>(kind) : ErrorKind::Internal, std::move(text));
}

}  // namespace

// --- looking ----------------------------------------------------------------------------------------------

void Group::checkHealth() {
  if (left_) return;
  hearMates();
  Blame blame;
  std::set<Rank> all;
  for (auto& active : tracks_) {
    if (active->phase == Phase::Idle) continue;
    Standstill at = standstillOf(*active);
    watch(*active, at);
    if (!blame.definite()) blame = blameFor(at.awaited, active->operations.front().sequence);
    all.merge(at.awaited);
  }
  std::set<Rank> senders = messagesAwait();
  if (process_.clock().now() - messagesAskedAt_ >= kAskPeriod) {
    messagesAskedAt_ = process_.clock().now();
    inquire(senders, 0, {});
  }
  if (!blame.definite()) blame = blameFor(senders, 0);
  all.merge(senders);
  inquiries_.keepOnly(all);
  members_[spec_.me].region->blame.store(blame.pack(), std::memory_order_relaxed);
  checkLost();
  checkDeadlines();
}

Standstill Group::standstillOf(const Active& active) const {
  if (active.phase == Phase::Idle) return {};
  if (active.phase != Phase::Arriving) return active.executor->standstill();
  Standstill at{"at the arrival", {}};
  for (int local = 0; local < topology_->teamSize(); ++local) {
    if (active.track.arrivalOf(local).number.load(std::memory_order_acquire) <
        active.track.execution) {
      at.awaited.insert(topology_->team()[local]);
    }
  }
  return at;
}

std::set<Rank> Group::messagesAwait() const {
  const auto awaited = matcher_->awaited();
  std::set<Rank> ranks(awaited.begin(), awaited.end());
  // A receive from anyone does not depend on one rank.
  ranks.erase(kAnySource);
  ranks.erase(spec_.me);
  return ranks;
}

// Asks the awaited ranks, and says in the log who holds up an operation that has stood for long.
void Group::watch(Active& active, const Standstill& at) {
  const Nanoseconds now = process_.clock().now();
  const Operation& operation = active.operations.front();
  Active::Watch& watch = active.watch;
  if (watch.sequence != operation.sequence) watch = {operation.sequence, now};
  if (watch.askedAt == 0 || now - watch.askedAt >= kAskPeriod) {
    watch.askedAt = now;
    inquire(at.awaited, operation.sequence, operation.call);
  }
  if (watch.reported || now - watch.since < kReportStopped) return;
  const Blame blame = blameFor(at.awaited, operation.sequence);
  const bool late = blame.why == Blame::Why::NotCalled;
  if (!blame.definite() || (late && now - watch.since < kReportLate)) return;
  watch.reported = true;
  SMDDP_LOG(Warn, "engine", "{} #{} (group \"{}\") has waited for {:.1f} s: {} {}",
            smddp::engine::describe(operation.call), operation.sequence, spec_.name,
            static_cast<double>(now - watch.since) * 1e-9, nameOf(blame.rank), blame.describe());
}

// Ranks of one node see each other's calls at the arrival, and blame in each other's regions.
void Group::inquire(const std::set<Rank>& awaited, uint64_t sequence,
                    const transport::CallFingerprint& call) {
  for (const Rank r : awaited) {
    const Member& member = members_[r];
    if (member.peer == nullptr || member.region != nullptr || member.peer->lost) continue;
    inquiries_.asked(r, process_.clock().now());
    process_.probeHost(*member.peer);
    InquiryMessage message;
    message.group = id_;
    message.sequence = sequence;
    message.call = call;
    sendControl(r, transport::bytesOf(message));
  }
}

Blame Group::blameFor(const std::set<Rank>& awaited, uint64_t sequence) const {
  Blame first;
  for (const Rank r : awaited) {
    if (r == spec_.me) continue;
    const Blame blame = blameOn(r, sequence);
    if (blame.definite()) return blame;
    if (first.rank < 0) first = blame;
  }
  return first;
}

Blame Group::blameOn(Rank rank, uint64_t sequence) const {
  const Member& member = members_[rank];
  if (member.region == nullptr) {
    const Blame theirs = inquiries_.of(rank, process_.clock().now());
    return theirs.rank == spec_.me ? Blame{rank} : theirs;
  }
  if (process_.isStopped(*member.peer)) return {rank, Blame::Why::Stopped};
  const uint64_t called = member.region->called.load(std::memory_order_relaxed);
  if (called < sequence) {
    return {rank, Blame::Why::NotCalled, static_cast<uint32_t>(called)};
  }
  const Blame theirs =
      Blame::unpack(member.region->blame.load(std::memory_order_relaxed), spec_.size);
  return theirs.definite() && theirs.rank != spec_.me ? theirs : Blame{rank};
}

bool Group::isLost(Rank rank) const {
  const Member& member = members_[rank];
  if (member.peer == nullptr) return false;
  if (member.region != nullptr && member.region->left.load(std::memory_order_acquire) != 0)
    return true;
  if (!member.peer->lost) return false;
  return member.region != nullptr || process_.clock().now() - member.peer->lostAt >= kLastBytes;
}

// A lost rank is an error only where it is awaited: it may have done its part and left.
void Group::checkLost() {
  const auto isAwaited = [&](const std::set<Rank>& awaited) {
    return std::any_of(awaited.begin(), awaited.end(), [&](Rank r) { return isLost(r); });
  };
  const bool suspect = isAwaited(messagesAwait()) ||
                       std::any_of(tracks_.begin(), tracks_.end(), [&](const auto& active) {
                         return isAwaited(standstillOf(*active).awaited);
                       });
  if (!suspect) return;
  // What the lost rank still said, its reason for one, may have arrived since we looked at it.
  if (hearMates() || process_.poll() + static_cast<size_t>(advance()) > 0) return;
  for (auto& active : tracks_) {
    if (active->phase == Phase::Idle) continue;
    breakIfLost(standstillOf(*active).awaited, active->operations.front().sequence);
  }
  breakIfLost(messagesAwait(), sequence_ + 1);
}

Error Group::goneError(Rank rank) const {
  const Member& member = members_[rank];
  const bool lost = member.peer != nullptr && member.peer->lost.has_value();
  return Error(ErrorKind::PeerLost, fmt::format("{} is gone: {}", nameOf(rank),
                                                lost ? *member.peer->lost : "it left the group"));
}

bool Group::breakIfLost(const std::set<Rank>& awaited, uint64_t sequence) {
  for (const Rank r : awaited) {
    if (!isLost(r)) continue;
    breakFrom(sequence, goneError(r), Cause::Mine);
    return true;
  }
  return false;
}

void Group::checkDeadlines() {
  for (const auto& active : tracks_) {
    if (active->phase == Phase::Idle) continue;
    for (const Operation& operation : active->operations) {
      if (!operation.deadline.passed(process_.clock())) continue;
      breakFrom(active->operations.front().sequence, lateError(*active, operation.request.timeout),
                Cause::Mine);
      break;
    }
  }
  std::optional<Error> late;
  matcher_->forEach([&](Exchange& exchange) {
    if (late || !exchange.deadline.passed(process_.clock())) return;
    late = lateError(exchange, exchange.message.timeout);
  });
  if (late) breakFrom(sequence_ + 1, *late, Cause::Mine);
}

void Group::expire(const Completion& completion, Nanoseconds waited) {
  if (completion.done()) return;
  std::optional<Error> late;
  const auto is = [&](const Operation& operation) {
    return operation.completion.get() == &completion;
  };
  for (const auto& active : tracks_) {
    if (std::any_of(active->operations.begin(), active->operations.end(), is)) {
      late = lateError(*active, waited);
    }
  }
  // What has not begun waits for what runs on the next track.
  if (std::any_of(pending_.begin(), pending_.end(), is)) {
    late = lateError(*tracks_[started_ % tracks_.size()], waited);
  }
  matcher_->forEach([&](Exchange& exchange) {
    if (exchange.completion.get() == &completion) late = lateError(exchange, waited);
  });
  if (late) fail(*late);
}

Error Group::lateError(const Active& active, Nanoseconds waited) const {
  const Standstill at = standstillOf(active);
  const uint64_t sequence = active.operations.empty() ? 0 : active.operations.front().sequence;
  const Blame blame = blameFor(at.awaited, sequence);
  return Error(ErrorKind::Timeout,
               fmt::format("Timed out after {:.1f} s, rank {} waits {} for rank{} {}{}",
                           static_cast<double>(waited) * 1e-9, spec_.me, at.where,
                           at.awaited.size() == 1 ? "" : "s", list(at.awaited), culprit(blame)));
}

Error Group::lateError(const Exchange& exchange, Nanoseconds waited) const {
  const Rank peer = exchange.message.peer;
  const Blame blame = peer == kAnySource ? Blame{} : blameFor({peer}, 0);
  return Error(ErrorKind::Timeout,
               fmt::format("Timed out after {:.1f} s, rank {} waits to {} {} {}{}",
                           static_cast<double>(waited) * 1e-9, spec_.me,
                           exchange.message.send ? "send to" : "receive from",
                           peer == kAnySource ? "any rank" : fmt::format("rank {}", peer),
                           describeTag(exchange.message.tag), culprit(blame)));
}

std::string Group::culprit(const Blame& blame) const {
  return blame.definite() ? fmt::format("; {} {}", nameOf(blame.rank), blame.describe()) : "";
}

// --- breaking ---------------------------------------------------------------------------------------------

uint64_t Group::oldestInFlight() const {
  uint64_t oldest = pending_.empty() ? sequence_ + 1 : pending_.front().sequence;
  for (const auto& active : tracks_) {
    if (active->phase != Phase::Idle) {
      oldest = std::min(oldest, active->operations.front().sequence);
    }
  }
  return oldest;
}

void Group::fail(const Error& cause) {
  if (watched_) {
    // A rank's death is the cause of what it has led to elsewhere.
    process_.checkPeers();
    checkMembers();
  }
  breakFrom(oldestInFlight(), cause, Cause::Mine);
}

void Group::watch(std::function<void(const Error&)> action) {
  watched_ = true;
  if (left_) return;
  if (broken_) {
    ended_.push_back([action = std::move(action), cause = broken_->cause] { action(cause); });
  } else {
    watchers_.push_back(std::move(action));
  }
}

// Who leaves in order has done its part. What is in flight is let be: it finds out itself whether it needs the dead.
bool Group::checkMembers() {
  if (left_ || broken_) return false;
  if (hearMates()) return true;
  for (Rank r = 0; r < spec_.size; ++r) {
    const Member& member = members_[r];
    if (member.peer == nullptr || !member.peer->died || !isLost(r)) continue;
    if (member.region != nullptr && member.region->left.load(std::memory_order_acquire) != 0) {
      continue;
    }
    breakFrom(sequence_ + 1, goneError(r), Cause::Mine);
    return true;
  }
  return false;
}

std::optional<Error> Group::failure() const {
  if (!broken_) return std::nullopt;
  return Error(broken_->cause.kind(),
               fmt::format("smddp: group \"{}\" failed on rank {}/{}: {}", spec_.name, spec_.me,
                           spec_.size, broken_->cause.what()));
}

void Group::breakFrom(uint64_t from, const Error& cause, Cause whose) {
  if (broken_ && broken_->from <= from) return;
  broken_.emplace(Break{from, cause});
  for (auto& action : std::exchange(watchers_, {})) {
    ended_.push_back([action = std::move(action), cause] { action(cause); });
  }
  SMDDP_LOG(Debug, "engine", "group \"{}\" is broken from #{} on: {}", spec_.name, from,
            cause.what());
  publishBreak();
  // Who hears of it tells nobody on other nodes: we do, and whoever waits for us asks (onInquiry).
  if (whose == Cause::Mine) {
    const auto message = transport::makeAbort(id_, from, encode(cause));
    for (Rank r = 0; r < spec_.size; ++r) {
      const Member& member = members_[r];
      if (member.peer == nullptr || member.region != nullptr || member.peer->lost) continue;
      sendControl(r, message);
      spreadingUntil_ = Deadline::after(process_.clock(), kSpreading);
    }
  }
  endBroken();
}

void Group::publishBreak() {
  RegionHeader& mine = *members_[spec_.me].region;
  const uint32_t number = mine.numBreaks.load(std::memory_order_relaxed);
  if (number == kMaxBreaks) return;
  BreakRecord& record = mine.breaks[number];
  const std::string text = broken_->cause.what();
  text.copy(record.text, sizeof record.text - 1);
  record.kind = static_cast<uint32_t>(broken_->cause.kind());
  record.from = broken_->from;
  mine.numBreaks.store(number + 1, std::memory_order_release);
  bell_.signalled();
  bell_.ring();
}

// Whether a mate has broken the group, from some operation on.
bool Group::hearMates() {
  bool heard = false;
  for (const Rank r : topology_->team()) {
    const Member& member = members_[r];
    if (member.peer == nullptr) continue;
    const uint32_t number =
        std::min(member.region->numBreaks.load(std::memory_order_acquire), kMaxBreaks);
    for (; heard_[r] < number; ++heard_[r]) {
      const BreakRecord& record = member.region->breaks[heard_[r]];
      breakFrom(
          record.from,
          decode(record.kind, std::string(record.text, strnlen(record.text, sizeof record.text))),
          Cause::Heard);
      heard = true;
    }
  }
  return heard;
}

// Ends what the break concerns: operations from broken_->from on, and all messages, which have no place in
// the order of operations.
void Group::endBroken() {
  // The network may still read the sources of puts: what they belong to lives as long as the group does.
  const auto giveUp = [&](Operation& operation) {
    if (operation.request.keepAlive) inFlight_.push_back(std::move(operation.request.keepAlive));
    end(*operation.completion, errorFor(operation.call, operation.sequence));
  };
  for (auto& active : tracks_) {
    if (active->operations.empty() || active->operations.front().sequence < broken_->from) continue;
    for (Operation& operation : active->operations) giveUp(operation);
    active->operations.clear();
    active->phase = Phase::Idle;
  }
  while (!pending_.empty() && pending_.back().sequence >= broken_->from) {
    giveUp(pending_.back());
    pending_.pop_back();
  }
  matcher_->forEach([&](Exchange& exchange) {
    if (exchange.message.keepAlive) inFlight_.push_back(std::move(exchange.message.keepAlive));
    end(*exchange.completion, Error(broken_->cause.kind(),
                                    fmt::format("smddp: {} (group \"{}\") failed on rank {}/{}: {}",
                                                exchange.message.send ? "send" : "recv", spec_.name,
                                                spec_.me, spec_.size, broken_->cause.what())));
  });
  matcher_->clear();
}

Error Group::errorFor(const transport::CallFingerprint& call, uint64_t sequence) const {
  return Error(broken_->cause.kind(),
               fmt::format("smddp: {} #{} (group \"{}\") failed on rank {}/{}: {}",
                           smddp::engine::describe(call), sequence, spec_.name, spec_.me,
                           spec_.size, broken_->cause.what()));
}

std::string Group::nameOf(Rank rank) const {
  const Peer* peer = members_[rank].peer;
  return fmt::format("rank {} ({})", rank, peer == nullptr ? self_ : peer->describe());
}

// --- hearing ----------------------------------------------------------------------------------------------

void Group::onControl(Peer& from, transport::Bytes message) {
  if (const auto abort = transport::parseAbort(message)) {
    if (abort->text.empty()) return;
    breakFrom(abort->from,
              decode(static_cast<uint32_t>(abort->text.front() - '0'),
                     std::string(abort->text.substr(1))),
              Cause::Heard);
    return;
  }
  const auto member = std::find_if(members_.begin(), members_.end(),
                                   [&](const Member& m) { return m.peer == &from; });
  if (member == members_.end()) return;
  const auto r = static_cast<Rank>(member - members_.begin());
  if (const auto answer = parseAnswer(message)) {
    inquiries_.answered(r, Blame::unpack(answer->blame, spec_.size));
  } else if (const auto inquiry = parseInquiry(message)) {
    onInquiry(r, *inquiry);
  } else if (!broken_) {
    attempt(sequence_ + 1, [&] {
      if (matcher_->onControl(r, message)) return true;
      raise(ErrorKind::Transport, "rank {} sent a message that is not understood", r);
    });
  }
}

void Group::onInquiry(Rank from, const InquiryMessage& inquiry) {
  const uint64_t sequence = inquiry.sequence;
  if (sequence > sequence_) {
    told_[from] = {sequence, inquiry.call};
  } else if (sequence > 0 && sequence + calls_.size() > sequence_) {
    attempt(sequence, [&] {
      requireSameCall(from, inquiry.call, calls_[sequence % calls_.size()]);
      return false;
    });
  }
  // Messages have no place in the order: any error ends them. But what we sent before we left still arrives.
  const bool leftInOrder = broken_ && broken_->cause.kind() == ErrorKind::Usage;
  if (broken_ && (sequence >= broken_->from || (sequence == 0 && !leftInOrder))) {
    const Error cause = leftInOrder ? goneError(spec_.me) : broken_->cause;
    sendControl(from, transport::makeAbort(id_, broken_->from, encode(cause)));
    return;
  }
  Blame blame =
      Blame::unpack(members_[spec_.me].region->blame.load(std::memory_order_relaxed), spec_.size);
  if (sequence > sequence_) {
    blame = {spec_.me, Blame::Why::NotCalled, static_cast<uint32_t>(sequence_)};
  }
  AnswerMessage answer;
  answer.group = id_;
  answer.blame = blame.pack();
  sendControl(from, transport::bytesOf(answer));
}

void Group::requireSameCall(Rank rank, const transport::CallFingerprint& theirs,
                            const transport::CallFingerprint& mine) const {
  if (sameCall(theirs, mine)) return;
  raise(ErrorKind::Mismatch,
        "{} is in {} while rank {} is in {}: all ranks must make the same calls in the same order",
        nameOf(rank), smddp::engine::describe(theirs), spec_.me, smddp::engine::describe(mine));
}

// --- leaving ----------------------------------------------------------------------------------------------

void Group::leave() {
  if (left_) return;
  left_ = true;
  watchers_.clear();
  if (!idle()) fail(Error(ErrorKind::Aborted, fmt::format("rank {} left the group", spec_.me)));
  // For whoever calls it still; others are not told, they may be busy with what we have done our part of.
  if (!error())
    broken_.emplace(Break{sequence_ + 1, Error(ErrorKind::Usage, "the group has been destroyed")});
  members_[spec_.me].region->left.store(1, std::memory_order_release);
  bell_.signalled();
  bell_.ring();
  std::set<transport::ChannelTable*> tables;
  for (const Member& member : members_) {
    if (member.peer != nullptr) tables.insert(member.peer->table);
  }
  for (transport::ChannelTable* table : tables) table->closeGroup(id_);
}

bool Group::abandoned() {
  for (const Member& member : members_) {
    if (member.peer == nullptr || member.peer->lost) continue;
    // A mate that saw us leave may have used its region for another group already.
    if (member.region != nullptr &&
        member.region->group.load(std::memory_order_acquire) == member.regionGroup &&
        member.region->left.load(std::memory_order_acquire) == 0) {
      return false;
    }
    if (!member.peer->table->drained(id_)) return false;
  }
  // Of a lost peer nobody knows what is still on its way.
  std::erase_if(taken_, [&](const Window& window) {
    return !window.from->mate && window.from->lost && !window.from->table->drained(id_);
  });
  abandoned_ = true;
  return true;
}

}  // namespace smddp::engine
