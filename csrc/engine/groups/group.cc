#include "engine/groups/group.h"

#include <algorithm>
#include <atomic>
#include <map>

#include "bootstrap/node_name.h"
#include "common/log.h"
#include "engine/plans/limits.h"
#include "reduction/reduce.h"

namespace smddp::engine::groups {
namespace {

// Tracks for which a group reserves address space. numTracksFor() says how many it uses, because only then its nodes
// are known.
constexpr int64_t kTracksAcrossNodes = 4;

memory::RegionLayout layoutFor(const Settings& settings, const plan::Limits& limits) {
  return {.tracks = std::max(settings.inFlight, kTracksAcrossNodes), .halfBytes = limits.halfBytes};
}

// "2 + 2"
std::string ranksOfNodes(const plan::Topology& topology) {
  std::string text;
  for (const auto& node : topology.nodes())
    text += fmt::format("{}{}", text.empty() ? "" : " + ", node.size());
  return text;
}

void warnOfOtherLayouts(const collectives::Tuning& tuning, const plan::Topology& topology) {
  if (tuning.rows().empty()) return;
  const auto isForUs = [&](const auto& row) { return collectives::isForLayout(row, topology); };
  if (std::none_of(tuning.rows().begin(), tuning.rows().end(), isForUs)) {
    SMDDP_LOG(Warn, "engine",
              "SMDDP_TUNING_FILE={} has no row for nodes of {} ranks: the built-in table chooses. "
              "`python -m smddp.bench --tune` measures a layout",
              tuning.origin(), ranksOfNodes(topology));
  }
}

// A setting that has no effect, or another one than its user expects, is not passed over in silence.
void warnOfPlaces(const Settings& settings, const plan::Topology& topology,
                  const std::vector<bootstrap::Introduction>& introductions) {
  if (topology.numNodes() == 1 && introductions.size() > 1) {
    for (const auto& [name, value] : {std::pair("SMDDP_INTERFACE", settings.interface),
                                      std::pair("SMDDP_PROVIDER", settings.provider)}) {
      if (value.empty()) continue;
      SMDDP_LOG(Warn, "engine", "{}={} has no effect: all ranks are on one node, without a network",
                name, value);
    }
  }
  // By host: whether ranks have a name that the user chose, and whether others have none.
  std::map<std::string, std::pair<bool, bool>> chosen;
  for (const auto& each : introductions) {
    auto& [named, unnamed] = chosen[each.host];
    (bootstrap::isChosenNodeName(each.nodeName) ? named : unnamed) = true;
  }
  for (const auto& [host, has] : chosen) {
    if (!has.first || !has.second) continue;
    SMDDP_LOG(Warn, "engine",
              "SMDDP_NODE_ID is set on some ranks of host {} and not on others: these count as "
              "different nodes, which share no memory; set it on all ranks or on none",
              host);
  }
}

WireOption wireOf(const Settings& settings, const GroupOptions& options) {
  return options.wire.empty() ? parseWire(settings.wire, "SMDDP_WIRE")
                              : parseWire(options.wire, "wire");
}

// The process meets the members that it does not know yet.
team::Membership membershipOf(process::Process& process, const GroupSpec& spec,
                              const Members& members) {
  const auto& introductions = members.introductions;
  team::Membership result{.name = spec.name,
                          .ofCallbacks = spec.ofCallbacks,
                          .group = members.groupId(),
                          .topology = plan::Topology::fromNames(members.nodeOfRank, spec.me),
                          .peers = {},
                          .jobRanks = spec.jobRanks,
                          .self = process::Peer::describe(introductions[spec.me])};
  for (Rank rank = 0; rank < spec.size; ++rank) {
    const bool sharesNode = result.topology.nodeOf(rank) == result.topology.myNode();
    result.peers.push_back(rank == spec.me ? nullptr
                                           : &process.meet(introductions[rank], sharesNode));
  }
  return result;
}

// The entries of all ranks. Ranks that choose different algorithms would wait for one another.
std::vector<team::GroupEntry> entriesOf(const std::vector<bootstrap::Introduction>& introductions) {
  std::vector<team::GroupEntry> entries;
  for (const auto& introduction : introductions) {
    entries.push_back(team::GroupEntry::decode(introduction));
    if (entries.back().algorithmDigest == entries.front().algorithmDigest) continue;
    raise(ErrorKind::Mismatch,
          "{} and {} would choose different algorithms: the group must be made with the same "
          "GroupOptions (algorithm and wire), and the files that SMDDP_TUNING_FILE names there "
          "must have the same rows",
          bootstrap::describe(introductions.front()), bootstrap::describe(introduction));
  }
  return entries;
}

int64_t numTracksFor(const Settings& settings, const team::Membership& membership) {
  if (settings.inFlight > 0) return settings.inFlight;
  return membership.spansNodes() ? kTracksAcrossNodes : 1;
}

}  // namespace

Place::Place(process::Process& process, std::shared_ptr<const collectives::Tuning> rows,
             GroupSpec asked)
    : spec(std::move(asked)),
      tuning(std::move(rows)),
      wire(wireOf(process.settings, spec.options)),
      limits(plans::limitsFrom(process.settings)) {
  reduction::simdLevel();
  collectives::checkOverrides(process.settings.algorithm);
  collectives::checkOverrides(spec.options.algorithm, "algorithm");
  region = std::make_shared<team::OwnRegion>(process, layoutFor(process.settings, limits));
  team::GroupEntry entry = region->entry();
  entry.algorithmDigest =
      tuning->digest(fmt::format("{};{}", spec.options.algorithm, toString(wire)));
  introduction = process.introduce(entry.encode());
}

Group::Group(process::Process& process, const Place& place, const Members& members)
    : process_(process),
      limits_(place.limits),
      status_(process.status().claim()),
      metrics_(process.metrics() ? process.metrics()->group(place.spec.name) : nullptr),
      spec(place.spec),
      wire(place.wire),
      membership(membershipOf(process, spec, members)),
      team(process, membership, place.region, entriesOf(members.introductions)),
      channels(process, membership, limits_),
      plans(membership.topology, limits_, process.settings, spec.options.algorithm, place.tuning,
            wire.wire.value_or(Wire::fp32), metrics_.get()),
      calls(membership, team, status_),
      sentinel(process, membership, team, channels, calls, ended, status_, metrics_.get()),
      messages(process, membership, channels, ended, metrics_.get()),
      operations(process, membership, team, channels, plans, calls, sentinel, ended, metrics_.get(),
                 numTracksFor(process.settings, membership), process.settings.fusionBytes) {
  sentinel.attach(operations, messages);
  // Only the first group warns. It is that of all ranks, and layouts of smaller groups are rarely measured.
  static std::atomic<bool> looked{false};
  if (spec.me == 0 && !looked.exchange(true)) {
    warnOfOtherLayouts(*place.tuning, membership.topology);
    warnOfPlaces(process.settings, membership.topology, members.introductions);
  }
}

bootstrap::Introduction Group::introductionOf(Rank rank, std::vector<std::byte> group) const {
  const process::Peer* peer = membership.peers[rank];
  bootstrap::Introduction introduction =
      peer == nullptr ? process_.introduce({}) : peer->introduction;
  introduction.group = std::move(group);
  introduction.jobRank = membership.jobRank(rank);
  return introduction;
}

void Group::submit(calls::Message message, calls::CompletionPtr completion) {
  if (const auto* end = sentinel.whyClosed()) {
    messages.refuse(message, *completion, *end);
    ended.release(std::move(message.keepAlive));
    return;
  }
  sentinel.attempt(calls.last() + 1,
                   [&] { messages.submit(std::move(message), std::move(completion)); });
}

void Group::interrupt() {
  if (sentinel.whyClosed() == nullptr) wasInterrupted_.store(true);
  sentinel.fail(Error(ErrorKind::Aborted,
                      fmt::format("{} was interrupted by a signal", membership.nameOf(spec.me))));
}

bool Group::advance() {
  bool advanced = operations.advance();
  if (!messages.idle()) {
    advanced |= sentinel.attempt(calls.last() + 1, [&] { return messages.advance(); });
  }
  team.bell().ring();
  return advanced;
}

std::vector<calls::CompletionPtr> Group::openExceptReceives() {
  std::vector<calls::CompletionPtr> open;
  operations.appendOpen(open);
  messages.appendOpenSends(open);
  return open;
}

bool Group::idle() const { return !sentinel.isSpreading() && operations.idle() && messages.idle(); }

void Group::onControl(process::Peer& from, transport::Bytes message) {
  const auto rank = membership.rankOf(from);
  if (!rank || sentinel.onControl(*rank, message) || sentinel.whyClosed() != nullptr) return;
  sentinel.attempt(calls.last() + 1, [&] { messages.onControl(*rank, message); });
}

const Error* Group::errorOfNextOperation() const {
  const calls::Break* end = sentinel.whyClosedFor(calls.last() + 1);
  return end != nullptr ? &end->cause : nullptr;
}

std::optional<Error> Group::breakAsUserError() const {
  if (sentinel.whyClosed() == nullptr) return std::nullopt;
  return membership.failed(fmt::format("group \"{}\"", spec.name), sentinel.whyClosed()->cause);
}

bool Group::tryGiveBack() {
  for (Rank rank = 0; rank < spec.size; ++rank) {
    const process::Peer* peer = membership.peers[rank];
    if (peer == nullptr || peer->lost) continue;
    if (membership.isMate(rank) && team.mayUseMemory(rank)) return false;
    if (!channels.isDrained(rank)) return false;
  }
  channels.allowGiveBack();
  team.allowGiveBack();
  ended.releaseKept();
  return true;
}

// ", int8 between nodes (auto)"
std::string Group::describeWire() const {
  const Wire now = plans.wire();
  if (now == Wire::fp32 && wire.wire) return {};
  return fmt::format(", {}{} between nodes{}", toString(now),
                     wire.feedback && now != Wire::fp32 ? " with error feedback" : "",
                     wire.wire ? "" : " (auto)");
}

std::string Group::describe() const {
  const size_t numTracks = operations.numTracks();
  return fmt::format(
      "group \"{}\": rank {} of {}{}, {} node{} ({} rank{}), {} operation{} at a time{}; "
      "algorithms "
      "by {}",
      spec.name, spec.me, spec.size,
      membership.isPart() ? fmt::format(" (rank {} of the job)", membership.jobRank(spec.me)) : "",
      membership.topology.numNodes(), membership.spansNodes() ? "s" : "",
      ranksOfNodes(membership.topology), spec.size > 1 ? "s" : "", numTracks,
      numTracks > 1 ? "s" : "", !membership.spansNodes() ? "" : describeWire(), plans.sources());
}

}  // namespace smddp::engine::groups
