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

// What a rank that waits says to ranks of other nodes that it waits for: where nobody sends what the other
// expects, no message would ever show that their calls differ.
//
//   byte  0               8               16              24                              40
//         | header        | group         | sequence      | call                          |
struct CallMessage {
  transport::ControlHeader header;
  uint64_t group = 0;
  uint64_t sequence = 0;
  transport::CallFingerprint call;
};
static_assert(sizeof(CallMessage) == 40 && std::is_trivially_copyable_v<CallMessage>);
constexpr uint8_t kCallTold = transport::kFirstEngineKind + 2;

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

void Group::checkHealth() {
  if (broken_) return;
  for (const Member& member : members_) {
    if (member.region == nullptr || member.peer == nullptr) continue;
    if (member.region->broken.load(std::memory_order_acquire) == 0) continue;
    const char* text = member.region->error;
    fail(decode(member.region->errorKind,
                std::string(text, strnlen(text, sizeof member.region->error))));
    return;
  }
  const auto awaited = [&] {
    std::set<Rank> ranks;
    for (const auto& active : tracks_) {
      Standstill at = standstillOf(*active);
      tellCall(*active, at.awaited);
      ranks.merge(at.awaited);
    }
    for (const Rank r : matcher_->awaited()) {
      // A receive from anyone does not depend on one rank.
      if (r != kAnySource) ranks.insert(r);
    }
    return ranks;
  };
  checkAwaited(awaited());
  // What the lost rank still said may have arrived since we looked at it.
  if (!suspects_.empty() && !advance() && !broken_) {
    const std::set<Rank> still = awaited();
    for (const Rank r : suspects_) {
      if (!still.contains(r)) continue;
      const Peer& peer = *members_[r].peer;
      fail(Error(ErrorKind::PeerLost,
                 fmt::format("rank {} ({}) is gone: {}", r, peer.describe(), *peer.lost)));
      return;
    }
  }
  if (!broken_) checkDeadlines();
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

// Once per operation.
void Group::tellCall(Active& active, const std::set<Rank>& awaited) {
  if (active.operations.empty() || active.told == active.operations.front().sequence) return;
  const Operation& operation = active.operations.front();
  active.told = operation.sequence;
  CallMessage message;
  message.header.kind = kCallTold;
  message.group = id_;
  message.sequence = operation.sequence;
  message.call = operation.call;
  for (const Rank r : awaited) {
    const Member& member = members_[r];
    // Ranks of one node have seen each other's calls at the arrival.
    if (member.peer == nullptr || member.region != nullptr || member.peer->lost) continue;
    member.peer->table->control(member.peer->id, transport::bytesOf(message));
  }
}

bool Group::onCallTold(Rank from, transport::Bytes bytes) {
  CallMessage message;
  if (bytes.size() != sizeof message) return false;
  std::memcpy(&message, bytes.data(), sizeof message);
  if (message.header.kind != kCallTold) return false;
  if (message.sequence > sequence_) {
    told_[from] = {message.sequence, message.call};
  } else if (message.sequence + calls_.size() > sequence_) {
    requireSameCall(from, message.call, calls_[message.sequence % calls_.size()]);
  }
  return true;
}

void Group::requireSameCall(Rank rank, const transport::CallFingerprint& theirs,
                            const transport::CallFingerprint& mine) const {
  if (sameCall(theirs, mine)) return;
  raise(ErrorKind::Mismatch,
        "rank {} ({}) is in {} while rank {} is in {}: all ranks must make the same calls in the "
        "same "
        "order",
        rank, members_[rank].peer->describe(), smddp::engine::describe(theirs), spec_.me,
        smddp::engine::describe(mine));
}

void Group::checkAwaited(const std::set<Rank>& awaited) {
  suspects_.clear();
  for (const Rank r : awaited) {
    if (members_[r].peer != nullptr && members_[r].peer->lost) suspects_.insert(r);
  }
}

void Group::checkDeadlines() {
  for (const auto& active : tracks_) {
    if (active->phase == Phase::Idle) continue;
    for (const Operation& operation : active->operations) {
      if (!operation.deadline.passed(process_.clock())) continue;
      fail(lateError(*active, operation.request.timeout));
      return;
    }
  }
  std::optional<Error> late;
  matcher_->forEach([&](Exchange& exchange) {
    if (late || !exchange.deadline.passed(process_.clock())) return;
    late = lateError(exchange, exchange.message.timeout);
  });
  if (late) fail(*late);
}

void Group::expire(const Completion& completion, Nanoseconds waited) {
  if (broken_ || completion.done()) return;
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
  return Error(ErrorKind::Timeout,
               fmt::format("(Timed out) after {:.1f} s, rank {} waits {} for rank{} {}",
                           static_cast<double>(waited) * 1e-9, spec_.me, at.where,
                           at.awaited.size() == 1 ? "" : "s", list(at.awaited)));
}

Error Group::lateError(const Exchange& exchange, Nanoseconds waited) const {
  const std::string peer = exchange.message.peer == kAnySource
                               ? "any rank"
                               : fmt::format("rank {}", exchange.message.peer);
  return Error(
      ErrorKind::Timeout,
      fmt::format("(Timed out) after {:.1f} s, rank {} waits to {} {} with tag {}",
                  static_cast<double>(waited) * 1e-9, spec_.me,
                  exchange.message.send ? "send to" : "receive from", peer, exchange.message.tag));
}

Error Group::errorFor(const transport::CallFingerprint& call, uint64_t sequence) const {
  return Error(broken_->kind(), fmt::format("smddp: {} #{} (group \"{}\") failed on rank {}/{}: {}",
                                            smddp::engine::describe(call), sequence, spec_.name,
                                            spec_.me, spec_.size, broken_->what()));
}

void Group::fail(const Error& cause) {
  if (broken_) return;
  broken_ = cause;
  SMDDP_LOG(Debug, "engine", "group \"{}\" is broken: {}", spec_.name, cause.what());
  RegionHeader& mine = *members_[spec_.me].region;
  const std::string text = cause.what();
  text.copy(mine.error, sizeof mine.error - 1);
  mine.errorKind = static_cast<uint32_t>(cause.kind());
  mine.broken.store(1, std::memory_order_release);
  wakeTeam();
  const auto message = transport::makeAbort(id_, encode(cause));
  for (const Member& member : members_) {
    if (member.peer != nullptr && member.region == nullptr && !member.peer->lost) {
      member.peer->table->control(member.peer->id, message);
      spreadingUntil_ = Deadline::after(process_.clock(), kSpreading);
    }
  }
  // The network may still read the sources of puts: what they belong to lives as long as the group does.
  const auto giveUp = [&](Operation& operation) {
    if (operation.request.keepAlive) inFlight_.push_back(std::move(operation.request.keepAlive));
    end(*operation.completion, errorFor(operation.call, operation.sequence));
  };
  for (auto& active : tracks_) {
    for (Operation& operation : active->operations) giveUp(operation);
    active->operations.clear();
    active->phase = Phase::Idle;
  }
  for (Operation& operation : pending_) giveUp(operation);
  pending_.clear();
  matcher_->forEach([&](Exchange& exchange) {
    if (exchange.message.keepAlive) inFlight_.push_back(std::move(exchange.message.keepAlive));
    end(*exchange.completion,
        Error(cause.kind(), fmt::format("smddp: {} (group \"{}\") failed on rank {}/{}: {}",
                                        exchange.message.send ? "send" : "recv", spec_.name,
                                        spec_.me, spec_.size, cause.what())));
  });
  matcher_->clear();
}

void Group::onControl(Peer& from, transport::Bytes message) {
  if (const auto abort = transport::parseAbort(message)) {
    if (abort->text.empty()) return;
    fail(decode(static_cast<uint32_t>(abort->text.front() - '0'),
                std::string(abort->text.substr(1))));
    return;
  }
  for (Rank r = 0; r < spec_.size; ++r) {
    if (members_[r].peer != &from) continue;
    try {
      if (!broken_ && !matcher_->onControl(r, message) && !onCallTold(r, message)) {
        raise(ErrorKind::Transport, "rank {} sent a message that is not understood", r);
      }
    } catch (const Error& error) {
      fail(error);
    }
    return;
  }
}

void Group::leave() {
  if (left_) return;
  left_ = true;
  if (!idle()) fail(Error(ErrorKind::Aborted, fmt::format("rank {} left the group", spec_.me)));
  // For whoever calls it still; mates are not told, they may be busy with what we have done our part of.
  if (!broken_) broken_ = Error(ErrorKind::Usage, "the group has been destroyed");
  members_[spec_.me].region->left.store(1, std::memory_order_release);
  wakeTeam();
  std::set<transport::ChannelTable*> tables;
  for (const Member& member : members_) {
    if (member.peer != nullptr) tables.insert(member.peer->table);
  }
  for (transport::ChannelTable* table : tables) table->closeGroup(id_);
}

bool Group::abandoned() {
  for (const Member& member : members_) {
    if (member.peer == nullptr || member.peer->lost) continue;
    if (member.region != nullptr && member.region->left.load(std::memory_order_acquire) == 0) {
      return false;
    }
    if (!member.peer->table->drained(id_)) return false;
  }
  abandoned_ = true;
  return true;
}

}  // namespace smddp::engine
