#include "engine/groups/group.h"

#include <algorithm>
#include <atomic>
#include <map>

#include "bootstrap/node_name.h"
#include "common/config.h"
#include "common/log.h"
#include "engine/plans/limits.h"
#include "reduction/reduce.h"

namespace smddp::engine::groups {
namespace {

// Tracks for which a group reserves address space. join() decides how many it uses, because only then its nodes are
// known.
constexpr int64_t kTracksAcrossNodes = 4;

memory::RegionLayout layoutFor(const plan::Limits& limits) {
  return {.tracks = std::max(settings().inFlight, kTracksAcrossNodes),
          .halfBytes = limits.halfBytes};
}

// "2 + 2"
std::string ranksOfNodes(const plan::Topology& topology) {
  std::string text;
  for (const auto& node : topology.nodes())
    text += fmt::format("{}{}", text.empty() ? "" : " + ", node.size());
  return text;
}

void warnOfOtherLayouts(const plan::Topology& topology) {
  const auto& tuning = collectives::tuningFromSettings();
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
void warnOfPlaces(const plan::Topology& topology,
                  const std::vector<bootstrap::Introduction>& introductions) {
  if (topology.numNodes() == 1 && introductions.size() > 1) {
    for (const auto& [name, value] : {std::pair("SMDDP_INTERFACE", settings().interface),
                                      std::pair("SMDDP_PROVIDER", settings().provider)}) {
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

WireOption wireOf(const GroupOptions& options) {
  return options.wire.empty() ? parseWire(settings().wire, "SMDDP_WIRE")
                              : parseWire(options.wire, "wire");
}

// Ranks that choose different algorithms would wait for one another.
void requireSameAlgorithms(const std::vector<bootstrap::Introduction>& introductions,
                           const std::vector<team::GroupEntry>& entries) {
  for (size_t rank = 1; rank < entries.size(); ++rank) {
    if (entries[rank].algorithmDigest == entries.front().algorithmDigest) continue;
    raise(ErrorKind::Mismatch,
          "{} and {} would choose different algorithms: the group must be made with the same "
          "GroupOptions (algorithm and wire), and the files that SMDDP_TUNING_FILE names there "
          "must have the same rows",
          bootstrap::describe(introductions.front()), bootstrap::describe(introductions[rank]));
  }
}

}  // namespace

Group::Group(process::Process& process, Spec spec)
    : process_(process),
      spec_(std::move(spec)),
      wire_(wireOf(spec_.options)),
      limits_(plans::limitsFromSettings()),
      team_(process, layoutFor(limits_)),
      status_(process.status().claim()),
      metrics_(process.metrics() ? process.metrics()->group(spec_.name) : nullptr) {
  // Refuses wrong settings now, and not only in the first collective.
  reduction::simdLevel();
  collectives::checkOverrides(settings().algorithm);
  collectives::checkOverrides(spec_.options.algorithm, "algorithm");
}

std::vector<std::byte> Group::makeEntry() {
  team::GroupEntry entry = team_.lease();
  entry.algorithmDigest = collectives::tuningFromSettings().digest(
      fmt::format("{};{}", spec_.options.algorithm, toString(wire_)));
  return entry.encode();
}

void Group::join(const std::vector<bootstrap::Introduction>& introductions,
                 const std::vector<std::string>& nodeOfRank) {
  std::vector<team::GroupEntry> entries;
  for (const auto& introduction : introductions)
    entries.push_back(team::GroupEntry::decode(introduction));
  requireSameAlgorithms(introductions, entries);
  try {
    joinAll(introductions, entries, nodeOfRank);
  } catch (const std::exception& error) {
    // Others may have joined. The mates hear of it in their first call.
    const auto* known = dynamic_cast<const Error*>(&error);
    const Error cause(
        known ? known->kind() : ErrorKind::Resource,
        fmt::format("rank {} cannot join group \"{}\": {}",
                    bootstrap::jobRankOf(spec_.jobRanks, spec_.me), spec_.name, error.what()));
    team_.publishBreak({1, cause});
    throw cause;
  }
}

void Group::joinAll(const std::vector<bootstrap::Introduction>& introductions,
                    const std::vector<team::GroupEntry>& entries,
                    const std::vector<std::string>& nodeOfRank) {
  team::Membership membership{.name = spec_.name,
                              .ofCallbacks = spec_.ofCallbacks,
                              .group = entries.front().groupId,
                              .topology = plan::Topology::fromNames(nodeOfRank, spec_.me),
                              .peers = {},
                              .jobRanks = spec_.jobRanks,
                              .self = process::Peer::describe(introductions[spec_.me])};
  const plan::Topology& nodes = membership.topology;
  // Once, for the first group, which is that of all ranks: the layouts of smaller ones are rarely measured.
  static std::atomic<bool> looked{false};
  if (spec_.me == 0 && !looked.exchange(true)) {
    warnOfOtherLayouts(nodes);
    warnOfPlaces(nodes, introductions);
  }
  for (Rank rank = 0; rank < spec_.size; ++rank) {
    const bool sharesNode = nodes.nodeOf(rank) == nodes.myNode();
    membership.peers.push_back(rank == spec_.me ? nullptr
                                                : &process_.meet(introductions[rank], sharesNode));
  }
  membership_.emplace(std::move(membership));
  team_.join(*membership_, entries);
  channels_.emplace(process_, *membership_, limits_);
  plans_.emplace(membership_->topology, limits_, spec_.options.algorithm,
                 wire_.wire.value_or(Wire::fp32), metrics_.get());
  calls_.emplace(*membership_, team_, status_);
  sentinel_.emplace(process_, *membership_, team_, *channels_, *calls_, ended_, status_,
                    metrics_.get());
  messages_.emplace(process_, *membership_, *channels_, ended_, metrics_.get());
  const int64_t numTracks = settings().inFlight > 0 ? settings().inFlight
                            : spansNodes()          ? kTracksAcrossNodes
                                                    : 1;
  operations_.emplace(process_, *membership_, team_, *channels_, *plans_, *calls_, *sentinel_,
                      ended_, metrics_.get(), numTracks);
  sentinel_->attach(*operations_, *messages_);
}

bootstrap::Introduction Group::introductionOf(Rank rank, std::vector<std::byte> group) const {
  const process::Peer* peer = membership_->peers[rank];
  bootstrap::Introduction introduction =
      peer == nullptr ? process_.introduce({}) : peer->introduction;
  introduction.group = std::move(group);
  introduction.jobRank = jobRank(rank);
  return introduction;
}

void Group::submit(calls::Request request, calls::CompletionPtr completion) {
  operations_->submit(std::move(request), std::move(completion));
}

void Group::submit(calls::Message message, calls::CompletionPtr completion) {
  if (sentinel_->broken()) {
    messages_->refuse(message, *completion, *sentinel_->broken());
    ended_.release(std::move(message.keepAlive));
    return;
  }
  sentinel_->attempt(calls_->last() + 1,
                     [&] { messages_->submit(std::move(message), std::move(completion)); });
}

void Group::interrupt() {
  if (!sentinel_->broken()) wasInterrupted_.store(true);
  fail(Error(ErrorKind::Aborted,
             fmt::format("{} was interrupted by a signal", membership_->nameOf(spec_.me))));
}

bool Group::advance() {
  bool advanced = operations_->advance();
  if (!messages_->idle()) {
    advanced |= sentinel_->attempt(calls_->last() + 1, [&] { return messages_->advance(); });
  }
  team_.bell().ring();
  return advanced;
}

std::vector<calls::CompletionPtr> Group::openExceptReceives() {
  std::vector<calls::CompletionPtr> open;
  operations_->appendOpen(open);
  messages_->appendOpenSends(open);
  return open;
}

bool Group::idle() const {
  return !sentinel_->isSpreading() && operations_->idle() && messages_->idle();
}

void Group::onControl(process::Peer& from, transport::Bytes message) {
  const auto rank = membership_->rankOf(from);
  if (!rank || sentinel_->onControl(*rank, message) || sentinel_->broken()) return;
  sentinel_->attempt(calls_->last() + 1, [&] { messages_->onControl(*rank, message); });
}

const Error* Group::errorOfNextOperation() const {
  return sentinel_->isBroken(calls_->last() + 1) ? &sentinel_->broken()->cause : nullptr;
}

std::optional<Error> Group::breakAsUserError() const {
  if (!sentinel_->broken()) return std::nullopt;
  return membership_->failed(fmt::format("group \"{}\"", spec_.name), sentinel_->broken()->cause);
}

bool Group::tryGiveBack() {
  for (Rank rank = 0; rank < spec_.size; ++rank) {
    const process::Peer* peer = membership_->peers[rank];
    if (peer == nullptr || peer->lost) continue;
    if (membership_->isMate(rank) && team_.mayUseMemory(rank)) return false;
    if (!channels_->isDrained(rank)) return false;
  }
  channels_->allowGiveBack();
  team_.allowGiveBack();
  ended_.releaseKept();
  return true;
}

// ", int8 between nodes (auto)"
std::string Group::describeWire() const {
  const Wire wire = plans_->wire();
  if (wire == Wire::fp32 && wire_.wire) return {};
  return fmt::format(", {}{} between nodes{}", toString(wire),
                     wire_.feedback && wire != Wire::fp32 ? " with error feedback" : "",
                     wire_.wire ? "" : " (auto)");
}

std::string Group::describe() const {
  const size_t numTracks = operations_->numTracks();
  return fmt::format(
      "group \"{}\": rank {} of {}{}, {} node{} ({} rank{}), {} operation{} at a time{}; "
      "algorithms "
      "by {}",
      spec_.name, spec_.me, spec_.size,
      membership_->isPart() ? fmt::format(" (rank {} of the job)", jobRank(spec_.me)) : "",
      topology().numNodes(), spansNodes() ? "s" : "", ranksOfNodes(topology()),
      spec_.size > 1 ? "s" : "", numTracks, numTracks > 1 ? "s" : "",
      !spansNodes() ? "" : describeWire(), plans_->sources());
}

}  // namespace smddp::engine::groups
