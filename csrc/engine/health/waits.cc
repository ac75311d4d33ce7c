#include "engine/health/waits.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/chrono.h>

#include "common/log.h"

namespace smddp::engine::health {
namespace {

// Between two inquiries of one wait.
constexpr Nanoseconds kAskPeriod = 100'000'000;
// Waits are written to the status board so often, once an operation has waited for so long.
constexpr Nanoseconds kShowPeriod = 200'000'000;
// The log reports an operation that has waited for so long, although nothing is known to be wrong: it takes much longer
// than those before it (InFlight::usual), and longer than most that are late for a good reason.
constexpr Nanoseconds kLongWait = 10'000'000'000;
constexpr Nanoseconds kTimesUsual = 20;
// Returns after how long the log reports a wait, given its cause. It takes some time already to find out that a host
// cannot be reached, or that a rank is silent.
Nanoseconds reportAfter(const team::Blame& blame, Nanoseconds usual) {
  switch (blame.why) {
    case team::Blame::Why::Stopped: return 1'000'000'000;
    case team::Blame::Why::Silent:
    case team::Blame::Why::Unreachable: return 0;
    default: return std::max(kLongWait, kTimesUsual * usual);
  }
}

// By the clock on the wall: "2026-05-04 13:02:09 UTC".
std::string timeOfDay(Nanoseconds ago) {
  const auto since = std::chrono::system_clock::now() - std::chrono::nanoseconds(ago);
  return fmt::format("{:%F %T} UTC", fmt::gmtime(std::chrono::system_clock::to_time_t(since)));
}

std::string statusHead(const team::Membership& membership) {
  return fmt::format("group\t{}\t{}\t{}\t{}\n", observe::StatusBoard::field(membership.name),
                     membership.me(), membership.size(), membership.jobRank(membership.me()));
}

}  // namespace

Waits::Waits(process::Process& process, const team::Membership& membership, team::Team& team,
             Diagnosis& diagnosis, observe::StatusBoard::Slot& status,
             observe::Metrics::Group* metrics)
    : process_(process),
      membership_(membership),
      team_(team),
      diagnosis_(diagnosis),
      status_(status),
      metrics_(metrics) {
  status_.write(membership.group, statusHead(membership), 0);
}

// Asks all awaited ranks, and publishes for the mates whom this rank blames.
void Waits::follow(const std::vector<calls::InFlight>& inFlight) {
  team::Blame blame;
  std::set<Rank> all, senders;
  std::map<uint64_t, Wait> waits;
  for (const calls::InFlight& at : inFlight) {
    all.insert(at.awaited.begin(), at.awaited.end());
    if (at.sequence == 0) {
      senders.insert(at.awaited.begin(), at.awaited.end());
    } else {
      const auto known = waits_.find(at.sequence);
      Wait& wait = waits[at.sequence] =
          known != waits_.end() ? known->second : Wait{.since = process_.clock().now()};
      followOne(wait, at);
    }
    if (!blame.definite()) blame = diagnosis_.blameFor(at.awaited, at.sequence);
  }
  waits_ = std::move(waits);
  show(inFlight);
  if (process_.clock().now() - messagesAskedAt_ >= kAskPeriod) {
    messagesAskedAt_ = process_.clock().now();
    diagnosis_.inquire(senders, 0, {});
  }
  diagnosis_.keepOnly(all);
  team_.publishBlame(blame);
}

// Asks the ranks that one operation awaits.
void Waits::followOne(Wait& wait, const calls::InFlight& at) {
  const Nanoseconds now = process_.clock().now();
  if (wait.exchanged != at.exchanged) {
    wait.exchanged = at.exchanged;
    wait.exchangedAt = now;
  }
  if (wait.askedAt == 0 || now - wait.askedAt >= kAskPeriod) {
    wait.askedAt = now;
    diagnosis_.inquire(at.awaited, at.sequence, at.fingerprint);
  }
  if (!wait.isReported && !at.awaited.empty()) report(wait, at);
}

void Waits::report(Wait& wait, const calls::InFlight& at) {
  const Nanoseconds waited = process_.clock().now() - wait.since;
  const team::Blame blame = diagnosis_.blameFor(at.awaited, at.sequence);
  if (waited < reportAfter(blame, at.usual)) return;
  wait.isReported = true;
  if (metrics_ != nullptr) metrics_->countStall();
  const std::string usual = at.usual == 0 ? ""
                                          : fmt::format("; such calls took {:.3g} s",
                                                        static_cast<double>(at.usual) * 1e-9);
  SMDDP_LOG(Warn, "engine",
            "{} #{} (group \"{}\") of rank {} has waited for {:.1f} s, since {}{}: it waits {}{}{}",
            membership_.describe(at.fingerprint), at.sequence, membership_.name,
            membership_.jobRank(membership_.me()), static_cast<double>(waited) * 1e-9,
            timeOfDay(waited), usual, at.wait, diagnosis_.culprit(blame), progressOf(at));
}

void Waits::show(const std::vector<calls::InFlight>& inFlight) {
  const Nanoseconds now = process_.clock().now();
  if (now - shownAt_ < kShowPeriod) return;
  std::string text;
  for (const calls::InFlight& at : inFlight) {
    const auto wait = waits_.find(at.sequence);
    const Nanoseconds since = wait == waits_.end() ? 0 : wait->second.since;
    if (since != 0 && now - since < kShowPeriod) continue;
    const std::string culprit = diagnosis_.culprit(diagnosis_.blameFor(at.awaited, at.sequence));
    text += fmt::format("wait\t{}\t{}\t{}\t{}\t{}\n", at.sequence, since,
                        at.sequence == 0 ? "message" : membership_.describe(at.fingerprint),
                        observe::StatusBoard::field(at.wait),
                        culprit.empty() ? "" : observe::StatusBoard::field(culprit.substr(2)));
  }
  if (text.empty()) return;
  shownAt_ = now;
  status_.write(membership_.group, statusHead(membership_) + text, now);
}

// Says when a call last exchanged data, because a call that only needs more time is not stuck.
std::string Waits::progressOf(const calls::InFlight& at) const {
  const auto wait = waits_.find(at.sequence);
  if (at.exchanged == 0 || wait == waits_.end()) return "";
  constexpr double kMiB = 1 << 20;
  return fmt::format(
      "; it has exchanged {:.1f} of {:.1f} MiB with other nodes, the last {:.1f} s ago",
      static_cast<double>(at.exchanged) / kMiB, static_cast<double>(at.toExchange) / kMiB,
      static_cast<double>(process_.clock().now() - wait->second.exchangedAt) * 1e-9);
}

}  // namespace smddp::engine::health
