#include "engine/store_meeting.h"

#include <poll.h>

#include <algorithm>
#include <span>
#include <utility>

#include "common/interrupt.h"
#include "common/log.h"
#include "engine/process/capabilities.h"

namespace smddp::engine {

StoreMeeting::StoreMeeting(Engine& engine, bootstrap::Store& store, const groups::GroupSpec& spec,
                           Nanoseconds timeout, const Engine::KnownMembers& known)
    : engine_(engine),
      store_(store),
      spec_(spec),
      timeout_(timeout),
      known_(known),
      seal_(engine.settings.jobToken.text) {}

std::vector<bootstrap::Rendezvous::Loss> StoreMeeting::look() {
  checkInterrupt();
  std::vector<bootstrap::Rendezvous::Loss> lost;
  if (!known_.parent) return lost;
  engine_.progress().call([&] {
    engine_.process().peers().check();
    for (size_t rank = 0; rank < known_.ranks.size(); ++rank) {
      const Rank there = known_.ranks[rank];
      auto error = known_.parent->sentinel.howLost(there);
      if (!error) continue;
      // Ranks that died come first: others may have left because of them.
      const process::Peer* peer = known_.parent->membership.peers[there];
      const bool died = peer != nullptr && peer->died;
      lost.insert(died ? lost.begin() : lost.end(),
                  {static_cast<Rank>(rank), *std::move(error), died});
    }
  });
  return lost;
}

bootstrap::Rendezvous& StoreMeeting::begin(std::optional<bootstrap::Rendezvous>& rendezvous,
                                           const std::string& name) {
  return rendezvous.emplace(
      store_, name, spec_.me, spec_.size, timeout_, seal_, [this] { return look(); },
      spec_.jobRanks);
}

groups::Members StoreMeeting::exchange(const bootstrap::Introduction& mine) {
  process::Process& process = engine_.process();
  const auto inRendezvous = [this](const auto& phase) {
    try {
      return phase();
    } catch (...) {
      othersKnow_ = true;
      throw;
    }
  };
  const auto probe = [&](const bootstrap::Introduction& other, std::string* why) {
    return process.tryMap(other, why);
  };
  const bootstrap::Locality locality = inRendezvous([&] {
    introductions_ = begin(nodeRendezvous_, spec_.name).exchange(mine);
    return nodeRendezvous_->agreeOnNodes(introductions_, probe);
  });
  const auto& names = locality.nodeOfRank;
  const auto remote = static_cast<size_t>(std::count_if(
      names.begin(), names.end(), [&](const auto& name) { return name != names[spec_.me]; }));
  if (remote > 0) {
    // The network is opened only now: on a single node it is never touched. Other groups go on while the resolver waits
    // for an answer.
    const std::string host = process::addressForPeers(engine_.settings);
    bootstrap::Introduction reachable;
    engine_.progress().call([&] {
      process.openFabric(remote, host);
      reachable = process.introduce(mine.group);
    });
    inRendezvous([&] {
      begin(networkRendezvous_, spec_.name + ".fabric").follow(*nodeRendezvous_);
      introductions_ = networkRendezvous_->exchange(reachable);
    });
  }
  engine_.progress().call([&] { process.setNodeAgreement(locality.agreement); });
  return {introductions_, names};
}

// All ranks of a new group wait here: a rank that went on to compute would not answer the handshake and would look
// dead.
// A rank that fails now is reported by the first operation. But if there is no connection between two ranks, both throw
// here: the one that has tried knows at once, and tells the other, which would wait for it. So does a rank whose time
// is over.
void StoreMeeting::complete() {
  if (!networkRendezvous_) return;
  process::Process& process = engine_.process();
  const Deadline deadline = Deadline::after(process.clock(), timeout_);
  // Usually all is settled before. The store's process serves all ranks.
  constexpr Nanoseconds kNotesPeriod = 250'000'000;
  Deadline nextNotes = Deadline::after(process.clock(), kNotesPeriod);
  // Sleeps until there is something to do. Where there are more ranks than cores, a rank that polls takes time that
  // another one needs for its answer. Another thread may take in the event first, so the sleep is short.
  constexpr int kSleepMilliseconds = 20;
  pollfd events{.fd = -1, .events = POLLIN, .revents = 0};
  for (;;) {
    std::vector<Rank> missing;
    std::optional<process::Peers::Unreached> unreached;
    engine_.progress().call([&] {
      process.peers().check();
      missing = process.peers().unconnectedAmong(introductions_);
      unreached = process.peers().unreachedAmong(introductions_);
      events.fd = process.peers().lifelineDescriptor();
    });
    if (unreached) raiseUnreached(*unreached);
    // A rank that has given this one up is not in the group.
    if (missing.empty()) return checkNotes();
    if (deadline.passed(process.clock())) raiseMissing(missing);
    checkInterrupt();
    if (nextNotes.passed(process.clock())) {
      checkNotes();
      nextNotes = Deadline::after(process.clock(), kNotesPeriod);
    }
    ::poll(&events, 1, kSleepMilliseconds);
  }
}

void StoreMeeting::raiseUnreached(const process::Peers::Unreached& unreached) const {
  const bootstrap::Introduction& other = introductions_[unreached.rank];
  raise(ErrorKind::PeerLost,
        "rank {} has no connection to rank {} ({}): {}; if that process runs, name the network "
        "between the hosts in SMDDP_INTERFACE",
        introductions_[spec_.me].jobRank, other.jobRank, process::Peer::describe(other),
        unreached.cause);
}

void StoreMeeting::raiseMissing(const std::vector<Rank>& missing) const {
  std::vector<Rank> others;
  for (const Rank rank : std::span(missing).subspan(1)) {
    others.push_back(introductions_[rank].jobRank);
  }
  raise(ErrorKind::Timeout,
        "rank {} waited {:.1f} s for a connection to {}{}: stopped, busy, or behind a firewall; "
        "look at their logs, or raise the timeout",
        introductions_[spec_.me].jobRank, static_cast<double>(timeout_) * 1e-9,
        bootstrap::describe(introductions_[missing.front()]),
        others.empty() ? "" : " and " + bootstrap::listRanks(others));
}

void StoreMeeting::checkNotes() {
  try {
    networkRendezvous_->checkNotes();
  } catch (const Error&) {
    othersKnow_ = true;
    throw;
  }
}

Error StoreMeeting::tell(const Error& error) noexcept {
  tellOtherGroups(error);
  if (std::exchange(othersKnow_, true)) return error;
  if (networkRendezvous_) {
    networkRendezvous_->tell(error);
    return error;
  }
  const Rank jobRank = bootstrap::jobRankOf(spec_.jobRanks, spec_.me);
  if (nodeRendezvous_) {
    nodeRendezvous_->tell(
        Error(error.kind(), fmt::format("{} cannot take part: {}",
                                        bootstrap::describeThisProcess(jobRank), error.what())));
  } else {
    bootstrap::reportTrouble(store_, spec_.name, spec_.me, jobRank, seal_, error);
  }
  return error;
}

// Ranks of other groups may be about to wait for this one.
void StoreMeeting::tellOtherGroups(const Error& error) noexcept {
  if (error.kind() != ErrorKind::PeerLost) return;
  try {
    engine_.progress().callAndRunContinuations(
        [&] { engine_.process().noteFailure(error.what()); });
  } catch (const Error& failure) {
    SMDDP_LOG(Debug, "engine", "no other group hears of \"{}\": {}", error.what(), failure.what());
  }
}

}  // namespace smddp::engine
