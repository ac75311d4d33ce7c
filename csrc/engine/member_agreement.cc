#include "engine/member_agreement.h"

#include <algorithm>
#include <csignal>
#include <optional>

#include "common/log.h"
#include "engine/agreement/agreement_codec.h"

namespace smddp::engine {
namespace {

using agreement::Agreement;
using agreement::Generation;
using agreement::Member;
using agreement::MemberId;
using agreement::Suspicion;

// A process that is stopped for longer is given up.
constexpr Nanoseconds kLongestStop = 6'000'000'000;

agreement::Rules rulesWith(Nanoseconds grace) {
  agreement::Rules rules;
  rules.grace = grace;
  return rules;
}

}  // namespace

MemberAgreement::MemberAgreement(MeetingPoint& point, const std::string& card, Nanoseconds grace)
    : point_(point), card_(card), agreement_({point.mailbox(), card}, rulesWith(grace)) {}

const bootstrap::Handle& MemberAgreement::handleOf(const std::string& card) {
  const auto found = handles_.find(card);
  if (found != handles_.end()) return found->second;
  const Seal seal(point_.engine().settings.jobToken.text);
  return handles_.emplace(card, bootstrap::parseHandle(card, seal)).first->second;
}

std::vector<bootstrap::Handle> MemberAgreement::handles() {
  std::vector<bootstrap::Handle> all;
  for (const Member& member : agreement_.current().members) all.push_back(handleOf(member.card));
  return all;
}

std::string MemberAgreement::describe(const Generation& generation, MemberId id) {
  const Member* member = generation.find(id);
  if (member == nullptr) return "another process";
  auto introduction = handleOf(member->card).introduction;
  introduction.jobRank = static_cast<Rank>(member - generation.members.data());
  return bootstrap::describe(introduction);
}

// Not on the owner, since it may map memory.
const process::Peer* MemberAgreement::peerOf(const Member& member) {
  const auto known = peers_.find(member.id);
  if (known != peers_.end()) return known->second;
  const process::Peer* peer = nullptr;
  try {
    const auto& introduction = handleOf(member.card).introduction;
    Engine& engine = point_.engine();
    std::string mine;
    engine.progress().call([&] {
      mine = engine.process().introduce({}).nodeName;
      peer = engine.process().peers().find(introduction.processId);
    });
    if (peer == nullptr) {
      point_.mapMates({introduction});
      engine.progress().call(
          [&] { peer = &engine.process().meet(introduction, introduction.nodeName == mine); });
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Resource) throw;
    SMDDP_LOG(Debug, "engine", "a member cannot be reached: {}", error.what());
  }
  return peers_[member.id] = peer;
}

void MemberAgreement::hear(const std::string& card) {
  agreement_.hear(memberOf(handleOf(card), card));
}

size_t MemberAgreement::numNewcomers() {
  point_.engine().progress().call([&] {
    point_.engine().process().poll();
    receive();
  });
  std::erase_if(inbox_, [&](const auto& entry) {
    const auto& [from, message] = entry;
    if (message.generation >= agreement_.current().number) return false;
    agreement_.onMessage(from, message, 0);
    return true;
  });
  send();
  return agreement_.numNewcomers();
}

void MemberAgreement::agree(int64_t committed, int64_t voted, Nanoseconds timeout) {
  agreement_.setProgress(committed, voted);
  agreement_.start(point_.engine().process().clock().now());
  run(timeout);
}

void MemberAgreement::join(const std::vector<Member>& members, Nanoseconds timeout) {
  // They can reach a process only if it has met them, too.
  for (const Member& member : members) peerOf(member);
  agreement_.awaitFirst();
  run(timeout);
}

// On the owner.
void MemberAgreement::receive() {
  for (const auto& note : point_.take(MeetingPoint::Topic::Agreement)) {
    auto message = agreement::parseMessage(note.bytes);
    peers_[message.first] = note.from;
    inbox_.push_back(std::move(message));
  }
}

// On the owner.
void MemberAgreement::lookForLosses(Nanoseconds now) {
  process::Peers& peers = point_.engine().process().peers();
  const auto awaited = agreement_.awaited();
  for (const auto& [id, peer] : peers_) {
    if (peer == nullptr) {
      agreement_.suspect(id, Suspicion::Silent, now);
      continue;
    }
    if (peer->lost) {
      agreement_.suspect(id, peer->isGone ? Suspicion::Dead : Suspicion::Silent, now);
      continue;
    }
    if (std::ranges::find(awaited, id) == awaited.end()) continue;
    auto& waited = *peers.find(peer->introduction.processId);
    if (!waited.mate) {
      peers.probeHost(waited);
      const auto silence = peers.silenceOf(waited);
      if (silence && silence->process > kLongestStop) {
        peers.giveUp(waited, "its process is stopped");
      }
    } else if (!waited.isStopped(point_.engine().process().clock())) {
      stoppedSince_.erase(id);
    } else if (now - stoppedSince_.emplace(id, now).first->second > kLongestStop) {
      // It could write into the memory of others when it is continued, so they may go on only after its death.
      SMDDP_LOG(Warn, "engine",
                "{} has been stopped for {} s, and is killed: the others go on without it",
                waited.describe(), kLongestStop / 1'000'000'000);
      ::kill(waited.introduction.pid, SIGKILL);
      stoppedSince_[id] = now;
    }
  }
}

// Those to this process itself are received at once.
void MemberAgreement::send() {
  for (auto outgoing = agreement_.takeOutgoing(); !outgoing.empty();
       outgoing = agreement_.takeOutgoing()) {
    std::vector<const process::Peer*> peers;
    for (auto& [to, message] : outgoing) {
      peers.push_back(to.id == point_.mailbox() || (to.card.empty() && !peers_.contains(to.id))
                          ? nullptr
                          : peerOf(to));
    }
    point_.engine().progress().call([&] {
      const Nanoseconds now = point_.engine().process().clock().now();
      for (size_t i = 0; i < outgoing.size(); ++i) {
        const auto& [to, message] = outgoing[i];
        if (to.id == point_.mailbox()) {
          agreement_.onMessage(to.id, message, now);
        } else if (peers[i] != nullptr) {
          point_.send(*peers[i], to.id, MeetingPoint::Topic::Agreement,
                      agreement::serialise(point_.mailbox(), message));
        }
      }
    });
  }
}

void MemberAgreement::run(Nanoseconds timeout) {
  const uint64_t before = agreement_.current().number;
  const auto deadline = Deadline::after(point_.engine().process().clock(), timeout);
  const auto isOver = [&] {
    return agreement_.state() == Agreement::State::Out ||
           (agreement_.state() == Agreement::State::Working &&
            agreement_.current().number > before);
  };
  for (const Member& member : agreement_.current().members) {
    if (member.id != point_.mailbox()) peerOf(member);
  }
  send();
  point_.waitUntil(
      [&] {
        const Nanoseconds now = point_.engine().process().clock().now();
        receive();
        while (!inbox_.empty() && !isOver()) {
          const auto [from, message] = std::move(inbox_.front());
          inbox_.pop_front();
          agreement_.onMessage(from, message, now);
        }
        lookForLosses(now);
        agreement_.tick(now);
        if (isOver()) return true;
        if (before == 0 && agreement_.suspects().size() == peers_.size()) {
          raise(ErrorKind::PeerLost, "no member is left that could let this process in");
        }
        if (!deadline.passed(point_.engine().process().clock())) return false;
        std::string waits;
        for (const MemberId id : agreement_.awaited()) {
          waits +=
              fmt::format("{}{}", waits.empty() ? "" : ", ", describe(agreement_.current(), id));
        }
        raise(ErrorKind::Timeout, "the members did not agree within {:.1f} s who goes on{}{}",
              static_cast<double>(timeout) * 1e-9, waits.empty() ? "" : ": no answer from ", waits);
      },
      [&] { send(); });
  send();
  const auto isMember = [&](MemberId id) { return agreement_.current().find(id) != nullptr; };
  std::erase_if(peers_, [&](const auto& entry) { return !isMember(entry.first); });
  std::erase_if(stoppedSince_, [&](const auto& entry) { return !isMember(entry.first); });
  std::erase_if(handles_, [&](const auto& entry) { return !isMember(entry.second.mailbox); });
}

}  // namespace smddp::engine
