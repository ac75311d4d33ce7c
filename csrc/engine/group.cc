#include "engine/group.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <new>

#include "common/config.h"
#include "common/log.h"
#include "engine/call.h"
#include "engine/limits.h"
#include "engine/wait_policy.h"
#include "reduction/reduce.h"

namespace smddp::engine {
namespace {

using collectives::Collective;

// Tracks for which a group reserves address space; how many it uses is decided when its nodes are known.
constexpr int64_t kTracksAcrossNodes = 4;
// The track number under which messages between two ranks travel.
constexpr uint8_t kMessageTrack = 255;
static_assert(kMostInFlight <= kMessageTrack && kMostWindow <= transport::kMaxWindow);
constexpr int64_t kMessageBytes = 64 << 10;
constexpr int64_t kMessageWindow = 4;

// Introduction::group.
struct GroupBlob {
  uint64_t regionOffset = 0;
  uint64_t regionBytes = 0;
  uint64_t groupId = 0;  // rank 0's counts
  uint64_t choices = 0;  // of algorithms: equal on all ranks, or they would wait for one another
};

GroupBlob parseBlob(const bootstrap::Introduction& introduction) {
  GroupBlob blob;
  if (introduction.group.size() != sizeof blob) {
    raise(ErrorKind::Transport, "the group's entry of pid {} on {} is malformed", introduction.pid,
          introduction.host);
  }
  std::memcpy(&blob, introduction.group.data(), sizeof blob);
  return blob;
}

// What overrules the built-in table, apart from the settings that are compared one by one.
uint64_t choicesOf(const Group::Spec& spec) {
  return collectives::tuningFromSettings().digest(spec.algorithm);
}

// "2 + 2"
std::string ranksOfNodes(const plan::Topology& topology) {
  std::string text;
  for (const auto& node : topology.nodes())
    text += fmt::format("{}{}", text.empty() ? "" : " + ", node.size());
  return text;
}

// Once, for the first group: those of some of its ranks are rarely measured.
void warnOfOtherLayouts(const plan::Topology& topology, Rank me) {
  static std::atomic<bool> looked{false};
  const auto& tuning = collectives::tuningFromSettings();
  if (me != 0 || looked.exchange(true) || tuning.rows().empty()) return;
  const auto isForUs = [&](const auto& row) { return collectives::isForLayout(row, topology); };
  if (std::none_of(tuning.rows().begin(), tuning.rows().end(), isForUs)) {
    SMDDP_LOG(Warn, "engine",
              "SMDDP_TUNING_FILE={} has no row for nodes of {} ranks: the built-in table chooses. "
              "`python -m smddp.bench --tune` measures a layout",
              tuning.origin(), ranksOfNodes(topology));
  }
}

void requireSameChoices(const std::vector<bootstrap::Introduction>& introductions) {
  const uint64_t first = parseBlob(introductions.front()).choices;
  for (size_t rank = 1; rank < introductions.size(); ++rank) {
    if (parseBlob(introductions[rank]).choices == first) continue;
    raise(ErrorKind::Mismatch,
          "{} and {} would choose different algorithms: the files that SMDDP_TUNING_FILE names "
          "there must have the same rows, and the group must be made with the same options",
          bootstrap::describe(0, introductions.front()),
          bootstrap::describe(static_cast<Rank>(rank), introductions[rank]));
  }
}

}  // namespace

Group::Group(Process& process, Spec spec)
    : process_(process),
      regions_(process.sharedRegions()),
      windows_(process.sharedWindows()),
      spec_(std::move(spec)),
      bell_(process),
      limits_(limitsFromSettings()) {
  // Not only in the first collective that looks for an algorithm.
  reduction::simdLevel();
  collectives::checkOverrides(settings().algorithm);
  collectives::checkOverrides(spec_.algorithm, "algorithm");
  layout_.tracks = std::max(settings().inFlight, kTracksAcrossNodes);
  layout_.halfBytes = limits_.poolBytes;
}

std::vector<std::byte> Group::publish() {
  region_ = regions_->take(layout_);
  const GroupBlob blob{process_.slab().offsetOf(region_.data()), region_.size(),
                       process_.newGroupId(), choicesOf(spec_)};
  reinterpret_cast<RegionHeader*>(region_.data())->group.store(blob.groupId);
  std::vector<std::byte> bytes(sizeof blob);
  std::memcpy(bytes.data(), &blob, sizeof blob);
  return bytes;
}

void Group::join(const std::vector<bootstrap::Introduction>& introductions,
                 const std::vector<std::string>& nodeOfRank) {
  requireSameChoices(introductions);
  topology_.emplace(plan::Topology::fromNames(nodeOfRank, spec_.me));
  warnOfOtherLayouts(*topology_, spec_.me);
  id_ = parseBlob(introductions.front()).groupId;
  members_.resize(static_cast<size_t>(spec_.size));
  heard_.resize(members_.size());
  self_ = Peer::describe(introductions[spec_.me]);
  std::vector<std::byte*> regions(topology_->team().size());
  for (Rank r = 0; r < spec_.size; ++r) {
    Member& member = members_[r];
    const bool sharesNode = topology_->nodeOf(r) == topology_->myNode();
    std::byte* region = nullptr;
    if (r == spec_.me) {
      region = region_.data();
    } else {
      member.peer = &process_.meet(introductions[r], sharesNode);
      if (!sharesNode) continue;
      const GroupBlob blob = parseBlob(introductions[r]);
      const auto& mate = *member.peer->mate;
      if (blob.regionBytes != region_.size() ||
          blob.regionOffset < sizeof(transport::shm::ProcessPage) ||
          blob.regionOffset % kPage != 0 || blob.regionOffset > mate.size() ||
          blob.regionBytes > mate.size() - blob.regionOffset) {
        raise(ErrorKind::Mismatch,
              "rank {} ({}) shares {} bytes for group \"{}\", this rank {}: do all ranks run the "
              "same smddp?",
              r, member.peer->describe(), blob.regionBytes, spec_.name, region_.size());
      }
      region = mate.data() + blob.regionOffset;
      member.regionGroup = blob.groupId;
      bell_.add(*member.peer);
    }
    member.region = reinterpret_cast<RegionHeader*>(region);
    regions[topology_->localOf(r)] = region;
  }
  plans_ = std::make_unique<PlanCache>(*topology_, limits_, spec_.algorithm);
  Matcher::Host& host = *this;
  matcher_ = std::make_unique<Matcher>(host, id_, spec_.me, kMessageBytes);
  const int64_t numTracks = settings().inFlight > 0 ? settings().inFlight
                            : spansNodes()          ? kTracksAcrossNodes
                                                    : 1;
  for (int64_t t = 0; t < numTracks; ++t) {
    auto active = std::make_unique<Active>();
    active->track.index = t;
    for (std::byte* region : regions) {
      active->track.headers.push_back(
          reinterpret_cast<TrackHeader*>(region + layout_.trackOffset(t)));
      active->track.halves.push_back(
          {region + layout_.poolOffset(t, 0), region + layout_.poolOffset(t, 1)});
    }
    active->executor = std::make_unique<Executor>(*topology_, active->track, bell_);
    tracks_.push_back(std::move(active));
  }
}

bootstrap::Introduction Group::introductionOf(Rank rank, std::vector<std::byte> group) const {
  const Peer* peer = members_[rank].peer;
  if (peer == nullptr) return process_.introduce(std::move(group));
  bootstrap::Introduction introduction = peer->introduction;
  introduction.group = std::move(group);
  return introduction;
}

Group::~Group() {
  // Freed pages read as zeros at once: to a mate that is still at the last operation, a wrong result. The
  // memory then lives until the last mate has unmapped it.
  if (topology_ && !abandoned_) return;
  for (const Window& window : taken_) windows_->giveBack(window.memory);
  if (!region_.empty()) regions_->giveBack(region_, layout_);
}

void Group::submit(Request request, CompletionPtr completion) {
  const uint64_t sequence = begin(*completion);
  const auto call = fingerprint(request);
  if (broken_ && sequence >= broken_->from) {
    end(*completion, errorFor(call, sequence));
    return;
  }
  const Deadline deadline = Deadline::after(process_.clock(), request.timeout);
  pending_.push_back({std::move(request), std::move(completion), deadline, sequence, call});
  calls_[sequence % calls_.size()] = call;
  if (told_.empty()) return;
  attempt(sequence, [&] {
    for (const auto& [rank, told] : told_) {
      if (told.sequence == sequence) requireSameCall(rank, told.call, call);
    }
    return false;
  });
}

uint64_t Group::begin(Completion& completion) {
  completion.setSequence(++sequence_);
  members_[spec_.me].region->called.store(sequence_, std::memory_order_relaxed);
  return sequence_;
}

bool Group::runAtOnce(Request& request, const CompletionPtr& completion) {
  Active& active = *tracks_.front();
  if (tracks_.size() > 1 || broken_ || request.collective != Collective::AllReduce ||
      request.output.size() != 1) {
    return false;
  }
  const collectives::Shape shape{request.collective, request.bytes};
  const PlanCache::Entry* found = nullptr;
  // Where there is none the operation is to end with the reason.
  attempt(sequence_ + 1, [&] {
    found = &plans_->get(shape);
    return false;
  });
  if (found == nullptr || !found->plan.isOneShot || !found->forAnyBuffers) return false;
  const PlanCache::Entry& entry = *found;
  const uint64_t sequence = begin(*completion);
  const auto call = fingerprint(request);
  bool summed = false;
  attempt(sequence, [&] {
    ++started_;
    ++active.track.execution;
    active.operations.clear();
    active.shape = shape;
    commitStaging(active, entry.plan);
    // Before anything is written to the line of the arrival, which the others have: a load in another width than that of
    // a store before it waits until the stores up to that one have gone.
    Binding& binding = bind(active, request, call, sequence);
    binding.output = Buffer(request.output.front().data());
    binding.input = Buffer(request.output.front().data());
    Arrival& mine = publishArrival(active, call, 1, /*shared=*/false, entry.plan.isSmall);
    active.executor->copyIn(entry.plan);
    mine.number.store(active.track.execution, std::memory_order_release);
    bell_.signalled();
    const bool arrived = WaitPolicy::spinUntil([&] { return allArrived(active); });
    summed = arrived && allCall(active, call);
    if (summed) active.executor->sum();
    return true;
  });
  hearMates();
  if (broken_ && broken_->from <= sequence) {
    end(*completion, errorFor(call, sequence));
  } else if (summed) {
    count(entry, 1, request.bytes);
    completion->finishUnseen();
  } else {
    const Deadline deadline = Deadline::after(process_.clock(), request.timeout);
    active.operations.push_back({std::move(request), completion, deadline, sequence, call});
    gather(active);
    active.phase = Phase::Arriving;
  }
  bell_.ring();
  return true;
}

bool Group::allCall(const Active& active, const transport::CallFingerprint& call) const {
  for (int local = 0; local < topology_->teamSize(); ++local) {
    if (!sameCall(active.track.arrivalOf(local).call, call)) return false;
  }
  return true;
}

void Group::submit(Message message, CompletionPtr completion) {
  if (broken_) {
    end(*completion, broken_->cause);
    return;
  }
  Exchange exchange;
  exchange.deadline = Deadline::after(process_.clock(), message.timeout);
  exchange.message = std::move(message);
  exchange.completion = std::move(completion);
  attempt(sequence_ + 1, [&] {
    matcher_->submit(std::move(exchange));
    return true;
  });
}

bool Group::advance() {
  const bool advanced = advanceOperations();
  bell_.ring();
  return advanced;
}

bool Group::advanceOperations() {
  bool advanced = false;
  for (auto& active : tracks_) {
    if (active->phase == Phase::Idle) continue;
    advanced |= attempt(active->operations.front().sequence, [&] { return advanceTrack(*active); });
  }
  while (!pending_.empty()) {
    Active& next = *tracks_[started_ % tracks_.size()];
    if (next.phase != Phase::Idle) break;
    advanced |= attempt(pending_.front().sequence, [&] {
      startNext(next);
      advanceTrack(next);
      return true;
    });
  }
  if (matcher_->idle()) return advanced;
  return attempt(sequence_ + 1, [&] { return matcher_->advance(); }) || advanced;
}

bool Group::advanceTrack(Active& active) {
  bool advanced = false;
  for (bool again = true; again;) {
    again = false;
    switch (active.phase) {
      case Phase::Idle: return advanced;
      case Phase::Arriving:
        if (allArrived(active)) {
          agree(active);
          again = true;
        }
        break;
      case Phase::Preamble:
        again = active.executor->advance();
        if (active.executor->preambleDone()) agree(active);
        break;
      case Phase::Running:
        again = active.executor->advance();
        if (active.executor->done()) finishTrack(active);
        break;
    }
    advanced |= again;
  }
  return advanced;
}

void Group::startNext(Active& active) {
  ++started_;
  ++active.track.execution;
  active.operations.clear();
  active.operations.push_back(std::move(pending_.front()));
  pending_.pop_front();
  takeFusable(active.operations);
  gather(active);
  Arrival& mine = active.track.arrivalOf(topology_->myLocal());
  const PlanCache::Entry& entry = plans_->get(active.shape);
  const bool shared = !entry.forAnyBuffers && myBuffersShared(active, mine);
  publishArrival(active, active.operations.front().call,
                 static_cast<uint32_t>(active.operations.size()), shared, entry.plan.isSmall);
  if (shared) {
    // Which plan it will be is known when the others' buffers are.
    mine.number.store(active.track.execution, std::memory_order_release);
    bell_.signalled();
    active.phase = Phase::Arriving;
  } else {
    run(active, /*arrived=*/false);
    active.phase = Phase::Preamble;
  }
}

// Small allreduces that wait behind one of the same kind join it. Only inside one node, where the arrival
// tells how many the others have; between nodes that would cost a round trip.
void Group::takeFusable(std::vector<Operation>& taken) {
  taken.reserve(kMaxFused);  // `first` stays where it is
  const Request& first = taken.front().request;
  if (tracks_.size() > 1 || spansNodes() || first.collective != Collective::AllReduce) return;
  int64_t bytes = first.bytes;
  while (!pending_.empty() && taken.size() < kMaxFused) {
    const Request& next = pending_.front().request;
    bytes += next.bytes;
    if (next.collective != first.collective || next.type != first.type || next.op != first.op ||
        next.factor != first.factor || bytes > settings().fusionBytes ||
        !copiesAlike(first.bytes, bytes)) {
      break;
    }
    taken.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
}

// Whoever has more requests ready than the others has copied all of them before it knows. What it copied must
// serve fewer, too.
bool Group::copiesAlike(int64_t one, int64_t several) {
  const auto& first = plans_->get({Collective::AllReduce, one});
  return first.choice->copiesFirst &&
         plans_->get({Collective::AllReduce, several}).choice == first.choice;
}

Arrival& Group::publishArrival(Active& active, const transport::CallFingerprint& call,
                               uint32_t ready, bool shared, bool isNear) {
  Arrival& mine = active.track.arrivalOf(topology_->myLocal());
  mine.call = call;
  mine.ready = ready;
  mine.shared = shared ? 1 : 0;
  mine.isNear = isNear ? 1 : 0;
  uint32_t end = 0;
  for (size_t i = 0; ready > 1 && i < active.operations.size(); ++i) {
    mine.ends[i] = end += static_cast<uint32_t>(active.operations[i].request.bytes);
  }
  return mine;
}

bool Group::allArrived(const Active& active) const {
  for (int local = 0; local < topology_->teamSize(); ++local) {
    if (active.track.arrivalOf(local).number.load(std::memory_order_acquire) <
        active.track.execution) {
      return false;
    }
  }
  return true;
}

// Everyone's description is there: all ranks of the node decide alike from here on.
void Group::agree(Active& active) {
  // Who gave up may have left, and its buffers with it.
  if (hearMates() && active.phase == Phase::Idle) return;
  const Track& track = active.track;
  const Arrival& mine = track.arrivalOf(topology_->myLocal());
  uint32_t fused = mine.ready;
  bool shared = true, anyShared = false;
  for (int local = 0; local < topology_->teamSize(); ++local) {
    const Arrival& theirs = track.arrivalOf(local);
    requireSameCall(topology_->team()[local], theirs.call, mine.call);
    // A copy: the mate can change what is there between two looks.
    const uint32_t ready = *static_cast<const volatile uint32_t*>(&theirs.ready);
    fused = std::clamp<uint32_t>(ready, 1, fused);
    const uint16_t isShared = *static_cast<const volatile uint16_t*>(&theirs.shared);
    shared &= isShared != 0;
    anyShared |= isShared != 0;
  }
  for (int local = 0; fused > 1 && local < topology_->teamSize(); ++local) {
    const Arrival& theirs = track.arrivalOf(local);
    if (std::equal(mine.ends.begin(), mine.ends.begin() + fused, theirs.ends.begin())) continue;
    raise(ErrorKind::Mismatch, "rank {} and rank {} reduce tensors of different sizes",
          topology_->team()[local], spec_.me);
  }
  const bool fewer = fused < active.operations.size();
  while (active.operations.size() > fused) {
    pending_.push_front(std::move(active.operations.back()));
    active.operations.pop_back();
  }
  if (fewer && broken_) endBroken();
  if (fewer) gather(active);
  // Who copied before it arrived has done so in vain if somebody else waited to be asked.
  if (active.phase == Phase::Arriving || fewer || (anyShared && active.plan->choice->copiesFirst)) {
    active.shape.shared = shared;
    active.shape.late = anyShared;
    run(active, /*arrived=*/true);
  }
  active.executor->binding().anyShared = anyShared;
  active.phase = Phase::Running;
}

void Group::run(Active& active, bool arrived) {
  const PlanCache::Entry& entry = plans_->get(active.shape);
  commitStaging(active, entry.plan);
  ensureChannels(active, entry.plan.plan);
  active.plan = &entry;
  bind(active);
  active.executor->start(entry.plan, arrived);
}

// What does not depend on buffers.
Binding& Group::bind(Active& active, const Request& request, const transport::CallFingerprint& call,
                     uint64_t sequence) const {
  Binding& binding = active.executor->binding();
  binding.anyShared = false;  // until all have arrived
  binding.type = request.type;
  binding.op = request.op;
  binding.scale.factor = request.factor;
  binding.scale.divisor = spec_.size;
  binding.call = call;
  binding.sequence = sequence;
  binding.mateOutputs.clear();
  binding.mateInputs.clear();
  return binding;
}

void Group::bind(Active& active) {
  const Operation& first = active.operations.front();
  Binding& binding = bind(active, first.request, first.call, first.sequence);
  binding.output = Buffer(active.output);
  const bool inPlace = buffersOf(active.shape, spec_.me, spec_.size).inPlace;
  binding.input = Buffer(inPlace ? active.output : active.input);
  if (!active.shape.shared) return;
  for (int local = 0; local < topology_->teamSize(); ++local) {
    const Arrival& theirs = active.track.arrivalOf(local);
    const Rank rank = topology_->team()[local];
    Peer* peer = members_[rank].peer;
    const collectives::BufferSizes buffers = buffersOf(active.shape, rank, spec_.size);
    const auto resolve = [&](const transport::shm::Location& at, const Pieces& mine,
                             int64_t bytes) -> std::byte* {
      if (bytes == 0) return nullptr;  // the collective gives this rank no such buffer
      if (peer == nullptr) return mine.front().data();
      return peer->memory->resolve(at, static_cast<size_t>(bytes));
    };
    binding.mateOutputs.push_back(resolve(theirs.output, active.output, buffers.outputBytes));
    binding.mateInputs.push_back(buffers.inPlace
                                     ? binding.mateOutputs.back()
                                     : resolve(theirs.input, active.input, buffers.inputBytes));
  }
}

// Takes the operations of an execution together.
void Group::gather(Active& active) {
  const Request& first = active.operations.front().request;
  active.shape = {first.collective, 0, first.root, /*shared=*/false};
  active.input.clear();
  active.output.clear();
  const auto append = [](Pieces& to, const Pieces& from) {
    std::copy_if(from.begin(), from.end(), std::back_inserter(to),
                 [](const auto& piece) { return !piece.empty(); });
  };
  for (const Operation& operation : active.operations) {
    active.shape.bytes += operation.request.bytes;
    append(active.input, operation.request.input);
    append(active.output, operation.request.output);
  }
}

// Writes where mates find our buffers, if they lie in communication memory.
bool Group::myBuffersShared(const Active& active, Arrival& mine) const {
  const auto locate = [&](const Pieces& pieces, transport::shm::Location& at) {
    if (pieces.size() != 1) return false;
    const auto found = process_.commMemory().locate(pieces.front().data(), pieces.front().size());
    if (found) at = *found;
    return found.has_value();
  };
  const auto buffers = buffersOf(active.shape, spec_.me, spec_.size);
  const bool hasInput = buffers.inputBytes > 0 && !buffers.inPlace;
  if (active.shape.bytes == 0) return false;
  return (buffers.outputBytes == 0 || locate(active.output, mine.output)) &&
         (!hasInput || locate(active.input, mine.input));
}

void Group::commitStaging(Active& active, const CachedPlan& cached) {
  const auto half = static_cast<size_t>(active.track.execution & 1);
  auto needed = static_cast<size_t>(cached.plan.poolBytes);
  const bool sends = cached.putsStaging && needed > active.sources[half];
  // What the network knows grows by doubling: each time it has to be told anew.
  if (sends) needed = std::min(std::bit_ceil(needed), static_cast<size_t>(layout_.halfBytes));
  std::byte* from = active.track.halves[topology_->myLocal()][half];
  if (needed > active.committed[half]) {
    process_.slab().commit({from + active.committed[half], needed - active.committed[half]});
    active.committed[half] = needed;
  }
  if (!sends) return;
  process_.addSource({from, needed});
  active.sources[half] = needed;
}

void Group::ensureChannels(Active& active, const plan::Plan& plan) {
  Track& track = active.track;
  for (const plan::ChannelUse& use : plan.channels) {
    auto ends = std::find_if(track.channels.begin(), track.channels.end(), [&](const auto& c) {
      return c.peer == use.peer && c.stream == use.stream;
    });
    if (ends == track.channels.end()) {
      track.channels.push_back({.peer = use.peer, .stream = use.stream});
      ends = std::prev(track.channels.end());
    }
    const auto number = static_cast<uint8_t>(track.index);
    if (use.puts > 0 && ends->send == nullptr) {
      Peer& peer = *members_[use.peer].peer;
      ends->send = &peer.table->send(key(spec_.me, use.peer, number, use.stream), peer.id);
    }
    if (use.arrivals > 0 && ends->receive == nullptr) {
      ends->receive = &openReceive(use.peer, number, use.stream, limits_.messageBytes);
    }
  }
}

transport::ReceiveChannel& Group::openReceive(Rank from, uint8_t track, uint8_t stream,
                                              int64_t messageBytes) {
  Peer& peer = *members_[from].peer;
  const int64_t window = track == kMessageTrack ? kMessageWindow : limits_.window;
  const auto bytes = static_cast<size_t>(window * transport::slotStride(messageBytes));
  const auto memory = windows_->take(bytes);
  taken_.push_back({memory, &peer});
  const auto region = process_.registerMemory(peer, memory);
  return peer.table->receive(key(from, spec_.me, track, stream), peer.id, memory, region, 0,
                             messageBytes, window);
}

void Group::finishTrack(Active& active) {
  if (spansNodes()) {
    for (const ChannelEnds& ends : active.track.channels) {
      if (ends.receive != nullptr) {
        members_[ends.peer].peer->table->flushGrants();
        break;
      }
    }
  }
  // What a mate has given up ends with its error here, too, even if all we need was there when we came late; and
  // with zero copy its buffers may have been overwritten while we read them.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (hearMates() && active.phase == Phase::Idle) return;
  const PlanCache::Entry& entry = *active.plan;
  RegionHeader& mine = *members_[spec_.me].region;
  if (mine.blame.load(std::memory_order_relaxed) != 0) mine.blame.store(0);
  count(entry, active.operations.size(), active.shape.bytes);
  active.phase = Phase::Idle;
  for (Operation& operation : active.operations) end(*operation.completion, std::nullopt);
  active.operations.clear();
}

void Group::count(const PlanCache::Entry& entry, uint64_t calls, int64_t bytes) {
  AlgorithmUse& use = *entry.use;
  use.calls += calls;
  use.bytes += static_cast<uint64_t>(bytes);
  use.memoryBytes += static_cast<uint64_t>(entry.plan.moveBytes);
  use.fabricBytes += static_cast<uint64_t>(entry.plan.putBytes);
  use.zeroCopy += entry.plan.plan.zeroCopy ? calls : 0;
}

void Group::end(Completion& completion, std::optional<Error> error) {
  for (auto& action : completion.finish(std::move(error))) ended_.push_back(std::move(action));
}

bool Group::idle() const {
  if (broken_ && !spreadingUntil_.passed(process_.clock())) return false;
  return pending_.empty() && matcher_->idle() &&
         std::all_of(tracks_.begin(), tracks_.end(),
                     [](const auto& active) { return active->phase == Phase::Idle; });
}

void Group::sendControl(Rank peer, transport::Bytes message) {
  Peer& to = *members_[peer].peer;
  to.table->control(to.id, message);
}

transport::SendChannel& Group::sendChannel(Rank peer) {
  Peer& to = *members_[peer].peer;
  return to.table->send(key(spec_.me, peer, kMessageTrack, 0), to.id);
}

transport::ReceiveChannel& Group::receiveChannel(Rank peer) {
  auto& channel = messageChannels_[peer];
  if (channel == nullptr) channel = &openReceive(peer, kMessageTrack, 0, kMessageBytes);
  return *channel;
}

bool Group::backlogged(Rank peer) { return members_[peer].peer->table->hasBacklog(); }

void Group::finish(Exchange& exchange) { end(*exchange.completion, std::nullopt); }

std::string Group::describe() const {
  return fmt::format(
      "group \"{}\": rank {} of {}, {} node{} ({} rank{}), {} operation{} at a time; algorithms by "
      "{}",
      spec_.name, spec_.me, spec_.size, topology_->numNodes(), spansNodes() ? "s" : "",
      ranksOfNodes(*topology_), spec_.size > 1 ? "s" : "", tracks_.size(),
      tracks_.size() > 1 ? "s" : "", plans_->sources());
}

}  // namespace smddp::engine
