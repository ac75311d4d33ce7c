#include "engine/operations/operations.h"

#include <algorithm>
#include <array>

#include "common/config.h"
#include "engine/calls/call.h"
#include "engine/process/wait_policy.h"

namespace smddp::engine::operations {
namespace {

using collectives::Collective;

}  // namespace

struct Operations::Transition {
  Phase from, to;
  bool (Operations::*condition)(TrackState&);  // or kAlways
  void (Operations::*action)(TrackState&);
};

static constexpr auto kAlways = nullptr;

// The life of an execution. From its phase it takes the first transition whose condition holds. An action that finds
// the group broken ends the execution, which is then Idle whatever the table says.
//
//   Idle        nothing runs on the track
//   Taken       has its operations
//   Arrived     has signalled its arrival; when all have, the plan is chosen, since it depends on the others' buffers
//   Preamble    runs the part of its plan that ends with the arrival of all
//   Running     runs the rest
const Operations::Transition Operations::kTransitions[] = {
    // from           to               condition                   action
    {Phase::Idle, Phase::Taken, &Operations::hasNext, &Operations::take},
    {Phase::Taken, Phase::Arrived, &Operations::decidesAfterArrival, &Operations::arrive},
    {Phase::Taken, Phase::Preamble, kAlways, &Operations::begin},
    {Phase::Arrived, Phase::Running, &Operations::allArrived, &Operations::agree},
    {Phase::Preamble, Phase::Running, &Operations::isPreambleDone, &Operations::agree},
    {Phase::Running, Phase::Idle, &Operations::isDone, &Operations::finish},
};

Operations::Operations(process::Process& process, const team::Membership& membership,
                       team::Team& team, plans::Channels& channels, plans::PlanCache& plans,
                       team::CallHistory& calls, health::Sentinel& sentinel,
                       calls::EndedOperations& ended, observe::Metrics::Group* metrics,
                       int64_t numTracks)
    : process_(process),
      membership_(membership),
      team_(team),
      channels_(channels),
      plans_(plans),
      calls_(calls),
      sentinel_(sentinel),
      ended_(ended),
      metrics_(metrics) {
  for (int64_t index = 0; index < numTracks; ++index) {
    tracks_.push_back(
        std::make_unique<TrackState>(process_.ownership(), membership_, team_, index));
  }
}

// --- submitting -------------------------------------------------------------------------------------------

void Operations::submit(calls::Request request, calls::CompletionPtr completion) {
  process_.ownership().assertOwned();
  const uint64_t sequence = calls_.begin(*completion);
  const auto call = calls::fingerprint(request);
  const Deadline deadline = Deadline::after(process_.clock(), request.timeout);
  const Nanoseconds now = metrics_ == nullptr ? 0 : process_.clock().now();
  pending_.push_back({std::move(request), std::move(completion), deadline, sequence, call, now});
  if (sentinel_.isBroken(sequence)) return endBroken(*sentinel_.broken());
  sentinel_.attempt(sequence, [&] { calls_.record(sequence, call); });
}

bool Operations::runOneShot(calls::Request& request, const calls::CompletionPtr& completion) {
  process_.ownership().assertOwned();
  TrackState& state = *tracks_.front();
  // With several tracks, another execution may still run beside this one.
  if (numTracks() > 1 || sentinel_.broken() || request.collective != Collective::AllReduce ||
      request.output.size() != 1) {
    return false;
  }
  const collectives::Shape shape{request.collective, request.bytes};
  const plans::PlanCache::Entry* entry = nullptr;
  // If no algorithm fits, attempt() breaks the group; submit() then ends the operation with that error.
  sentinel_.attempt(calls_.last() + 1, [&] { entry = &plans_.get(shape); });
  if (entry == nullptr || entry->start != plans::Start::OneShot) return false;
  const Nanoseconds submittedAt = metrics_ == nullptr ? 0 : process_.clock().now();
  const uint64_t sequence = calls_.begin(*completion);
  const auto call = calls::fingerprint(request);
  bool isSummed = false;
  sentinel_.attempt(sequence, [&] {
    beginExecution(state);
    state.shape = shape;
    state.entry = plans::PlanCache::Held(*entry);
    team_.prepareStaging(state.track, static_cast<size_t>(entry->cached.plan.stagingBytes),
                         /*isSent=*/false);
    // bind() must come before publish(). publish() stores into a cache line that the mates hold, so these stores wait
    // in the store buffer. A later load that is wider than one of them cannot be served from the buffer and would wait
    // as well.
    plans::Binding& binding = bind(state, request, call);
    binding.output = calls::Buffer(request.output.front().data());
    binding.input = binding.output;
    team_.publish(
        state.track,
        {.fingerprint = call, .ends = {}, .buffers = nullptr, .isNear = entry->cached.fitsNear});
    state.executor.copyIn(entry->cached);
    team_.arrive(state.track);
    const auto arrived = [&] { return allArrived(state); };
    if (metrics_ != nullptr && !arrived()) state.waitsSince = process_.clock().now();
    if (!process::WaitPolicy::spinUntil(arrived)) return;
    endWait(state, state.waited.node);
    team_.agree(state.track);
    state.executor.sum();
    isSummed = true;
  });
  sentinel_.takeMatesBreaks();
  if (!sentinel_.isBroken(sequence) && isSummed) {
    entry->count(1, request.bytes);
    // Not measured: it has taken next to no time.
    entry->recent.add(0);
    if (metrics_ != nullptr) {
      observe::Metrics::Calls& calls = entry->metrics->of(request.bytes);
      calls.count(process_.clock().now() - submittedAt, request.bytes);
      calls.countExecution(/*wireBytes=*/0, state.waited);
    }
    completion->finishUnseen();
  } else {
    const Deadline deadline = Deadline::after(process_.clock(), request.timeout);
    state.operations.push_back(
        {std::move(request), completion, deadline, sequence, call, submittedAt});
    state.beganAt = process_.clock().now();
    combine(state);
    state.phase = Phase::Arrived;
    if (sentinel_.isBroken(sequence)) endBroken(*sentinel_.broken());
  }
  team_.bell().ring();
  return true;
}

// Small allreduces that wait behind one of the same kind join it. Only inside one node, where the arrival tells how
// many the others have; between nodes that would cost a round trip. And only with one track: with several, another
// execution may still run beside this one.
void Operations::takeFusable(std::vector<Operation>& taken) {
  taken.reserve(memory::kMaxFused);  // `first` stays where it is
  const calls::Request& first = taken.front().request;
  if (numTracks() > 1 || membership_.spansNodes() || first.collective != Collective::AllReduce) {
    return;
  }
  int64_t bytes = first.bytes;
  while (!pending_.empty() && taken.size() < memory::kMaxFused) {
    const calls::Request& next = pending_.front().request;
    if (conflicts(taken, pending_.front())) break;
    bytes += next.bytes;
    if (next.collective != first.collective || next.type != first.type || next.op != first.op ||
        next.factor != first.factor || bytes > settings().fusionBytes ||
        !canFuse(first.bytes, bytes)) {
      break;
    }
    taken.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
}

// Whether requests of `first` bytes may grow to `together` bytes in one execution: the same algorithm serves both, and
// it copies before the arrival (one_shot). A rank that has more requests than the others learns that at the arrival,
// when it has copied all of them; what it copied must also serve the plan for fewer.
bool Operations::canFuse(int64_t first, int64_t together) {
  const collectives::Choice* choice = plans_.get({Collective::AllReduce, first}).choice;
  return choice->preamble != collectives::Preamble::NoCopy &&
         plans_.choiceFor({Collective::AllReduce, together}) == choice;
}

bool Operations::conflicts(const std::vector<Operation>& running, const Operation& next) {
  return std::ranges::any_of(running, [&](const Operation& operation) {
    return operation.footprint.conflictsWith(next.footprint);
  });
}

// --- the life of an execution -----------------------------------------------------------------------------

bool Operations::advance() {
  process_.ownership().assertOwned();
  bool advanced = false;
  for (auto& state : tracks_) {
    if (state->phase == Phase::Idle) continue;
    advanced |=
        sentinel_.attempt(state->operations.front().sequence, [&] { return advance(*state); });
  }
  while (nextTrack().phase == Phase::Idle && hasNext(nextTrack())) {
    advanced |= sentinel_.attempt(pending_.front().sequence, [&] { return advance(nextTrack()); });
  }
  return advanced;
}

// Advances one execution until it can do nothing more, or has ended.
bool Operations::advance(TrackState& state) {
  bool advanced = false;
  while (takeTransition(state)) {
    advanced = true;
    if (state.phase == Phase::Idle) break;
  }
  return advanced;
}

bool Operations::takeTransition(TrackState& state) {
  const Phase phase = state.phase;
  const bool hasPlan = phase == Phase::Preamble || phase == Phase::Running;
  const bool advanced = hasPlan && state.executor.advance();
  if (phase == Phase::Running && state.executor.hasReceived()) {
    endWait(state, state.waited.network);
  }
  for (const Transition& transition : kTransitions) {
    if (transition.from != phase) continue;
    if (transition.condition != kAlways && !(this->*transition.condition)(state)) continue;
    (this->*transition.action)(state);
    if (state.phase == phase) state.phase = transition.to;
    return true;
  }
  if (!advanced && metrics_ != nullptr) noteWait(state);
  return advanced;
}

// Two waits are told apart: for the last rank of this node to arrive, and then for the first data of another node.
void Operations::noteWait(TrackState& state) {
  if (state.waitsSince != 0) return;
  const bool isOver = !membership_.spansNodes() || state.executor.hasReceived();
  if (state.phase == Phase::Running && isOver) return;
  state.waitsSince = process_.clock().now();
}

void Operations::endWait(TrackState& state, Nanoseconds& waited) {
  if (state.waitsSince == 0) return;
  waited += process_.clock().now() - state.waitsSince;
  state.waitsSince = 0;
}

// Only this rank knows where its buffers lie, so others may begin an execution that this one holds back. Those that are
// in flight do not need it, so they end, and then it begins.
bool Operations::hasNext(TrackState&) {
  if (pending_.empty()) return false;
  const Operation& next = pending_.front();
  const bool isBarrier = next.request.collective == Collective::Barrier &&
                         next.request.partOf == calls::PartOf::Itself;
  if (isBarrier) return oldestInFlight() == nullptr;
  return std::ranges::none_of(tracks_, [&](const auto& state) {
    return state->phase != Phase::Idle && conflicts(state->operations, next);
  });
}

Operations::TrackState* Operations::oldestInFlight() {
  TrackState* oldest = nullptr;
  for (const auto& state : tracks_) {
    if (state->phase == Phase::Idle) continue;
    if (oldest == nullptr ||
        state->operations.front().sequence < oldest->operations.front().sequence) {
      oldest = state.get();
    }
  }
  return oldest;
}

void Operations::beginExecution(TrackState& state) {
  ++started_;
  ++state.track.executionNumber;
  state.track.afterArrival = false;
  state.waited = {};
  state.waitsSince = 0;
  state.operations.clear();
}

void Operations::take(TrackState& state) {
  beginExecution(state);
  state.beganAt = process_.clock().now();
  state.operations.push_back(std::move(pending_.front()));
  pending_.pop_front();
  takeFusable(state.operations);
  combine(state);
  state.entry = plans::PlanCache::Held(plans_.get(state.shape));
  state.buffers.reset();
  if (state.entry->start == plans::Start::DecideAfterArrival) state.buffers = locate(state);
}

// Only a rank with shared buffers waits with its decision. One with private buffers runs the plan for them at once. If
// a mate's buffers are shared, it learns that at the arrival, and does not use what it has copied.
bool Operations::decidesAfterArrival(TrackState& state) { return state.buffers.has_value(); }

void Operations::arrive(TrackState& state) {
  publish(state);
  team_.arrive(state.track);
}

void Operations::begin(TrackState& state) {
  publish(state);
  run(state, /*arrived=*/false);
}

// All have arrived: from here on all ranks of the node take the same decisions.
void Operations::agree(TrackState& state) {
  endWait(state, state.waited.node);
  // A mate whose operation has ended with an error may have left, and its buffers may be gone.
  if (sentinel_.takeMatesBreaks() && state.phase == Phase::Idle) return;
  const team::Agreement agreement = team_.agree(state.track);
  auto& operations = state.operations;
  const bool takesFewer = agreement.fused < operations.size();
  while (operations.size() > agreement.fused) {
    pending_.push_front(std::move(operations.back()));
    operations.pop_back();
  }
  if (takesFewer) {
    // A break that was met earlier may concern the operations that went back to the queue. Nothing else would end them.
    if (sentinel_.broken()) endBroken(*sentinel_.broken());
    combine(state);
  }
  const bool copiedInVain =
      agreement.afterArrival && state.entry->choice->preamble != collectives::Preamble::NoCopy;
  state.track.afterArrival = agreement.afterArrival;
  if (state.phase == Phase::Preamble && !takesFewer && !copiedInVain) return;
  state.shape.shared = agreement.shared;
  state.shape.afterArrival = agreement.afterArrival;
  state.entry = plans::PlanCache::Held(plans_.get(state.shape));
  run(state, /*arrived=*/true);
}

void Operations::finish(TrackState& state) {
  if (membership_.spansNodes()) channels_.sendGrantsNow(state.track);
  // If a mate has ended this operation with an error, it ends with that error here too, even if we have all data: with
  // zero copy the mate may have overwritten its buffer while we read it.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (sentinel_.takeMatesBreaks() && state.phase == Phase::Idle) return;
  team_.clearBlame();
  state.entry->count(state.operations.size(), state.shape.bytes);
  const Nanoseconds now = process_.clock().now();
  state.entry->recent.add(now - state.beganAt);
  if (metrics_ != nullptr) count(state, now);
  for (Operation& operation : state.operations) {
    ended_.finish(*operation.completion, std::nullopt);
    ended_.release(std::move(operation.request.keepAlive));
  }
  state.operations.clear();
}

void Operations::count(const TrackState& state, Nanoseconds now) {
  observe::Metrics::Algorithm& algorithm = *state.entry->metrics;
  for (const Operation& operation : state.operations) {
    const int64_t bytes = operation.request.bytes;
    algorithm.of(bytes).count(now - operation.submittedAt, bytes);
  }
  algorithm.of(state.operations.front().request.bytes)
      .countExecution(state.entry->cached.putBytes, state.waited);
}

// --- buffers and plans ------------------------------------------------------------------------------------

// Sets the shape and the buffers of the execution: those of all its operations, one behind the other.
void Operations::combine(TrackState& state) {
  const calls::Request& first = state.operations.front().request;
  state.shape = {first.collective, 0, first.root, /*shared=*/false};
  state.input.clear();
  state.output.clear();
  const auto append = [](calls::Pieces& to, const calls::Pieces& from) {
    std::copy_if(from.begin(), from.end(), std::back_inserter(to),
                 [](const auto& piece) { return !piece.empty(); });
  };
  for (const Operation& operation : state.operations) {
    state.shape.bytes += operation.request.bytes;
    append(state.input, operation.request.input);
    append(state.output, operation.request.output);
  }
  state.shape.wire = plans_.wireFor(first, state.shape.bytes);
  state.shape.feedback = state.shape.wire != Wire::fp32 && first.residual != nullptr;
}

// Where mates find this rank's buffers, if all of them lie in communication memory.
std::optional<memory::BufferLocations> Operations::locate(const TrackState& state) const {
  memory::BufferLocations locations;
  const auto found = [&](const calls::Pieces& pieces, transport::shm::Location& at) {
    if (pieces.size() != 1) return false;
    const auto where =
        process_.memory().tensors->locate(pieces.front().data(), pieces.front().size());
    if (where) at = *where;
    return where.has_value();
  };
  const auto buffers = buffersOf(state.shape, membership_.me(), membership_.size());
  const bool hasInput = buffers.inputBytes > 0 && !buffers.inPlace;
  if (state.shape.bytes == 0) return std::nullopt;
  if (buffers.outputBytes > 0 && !found(state.output, locations.output)) return std::nullopt;
  if (hasInput && !found(state.input, locations.input)) return std::nullopt;
  return locations;
}

void Operations::publish(TrackState& state) {
  const auto& operations = state.operations;
  std::array<uint32_t, memory::kMaxFused> ends;
  uint32_t end = 0;
  for (size_t i = 0; i < operations.size(); ++i) {
    ends[i] = end += static_cast<uint32_t>(operations[i].request.bytes);
  }
  const size_t fusable = operations.size() > 1 ? operations.size() : 0;
  team_.publish(state.track, {.fingerprint = operations.front().fingerprint,
                              .ends = std::span(ends).first(fusable),
                              .buffers = state.buffers ? &*state.buffers : nullptr,
                              .isNear = state.entry->cached.fitsNear});
}

// Starts the execution's plan, after its preamble if all have `arrived`. (runOneShot() starts none.)
void Operations::run(TrackState& state, bool arrived) {
  const plans::CachedPlan& cached = state.entry->cached;
  team_.prepareStaging(state.track, static_cast<size_t>(cached.plan.stagingBytes),
                       cached.putsStaging);
  channels_.open(state.track, cached);
  const Operation& first = state.operations.front();
  plans::Binding& binding = bind(state, first.request, first.fingerprint);
  binding.output = calls::Buffer(state.output);
  const auto buffers = buffersOf(state.shape, membership_.me(), membership_.size());
  binding.input = calls::Buffer(buffers.inPlace ? state.output : state.input);
  if (state.shape.shared) bindMates(state, binding);
  state.executor.start(cached, arrived);
}

// Fills in what does not depend on buffers. The caller adds input and output.
plans::Binding& Operations::bind(TrackState& state, const calls::Request& request,
                                 const transport::CallFingerprint& call) const {
  plans::Binding& binding = state.executor.binding();
  binding.type = request.type;
  binding.op = request.op;
  binding.scale.factor = request.factor;
  binding.scale.divisor = membership_.size();
  binding.fingerprint = call;
  binding.residual = request.residual.get();
  binding.mateOutputs.clear();
  binding.mateInputs.clear();
  return binding;
}

void Operations::bindMates(TrackState& state, plans::Binding& binding) const {
  const plan::Topology& topology = membership_.topology;
  const auto mine = [](const calls::Pieces& pieces) {
    return pieces.empty() ? nullptr : pieces.front().data();
  };
  for (int local = 0; local < topology.teamSize(); ++local) {
    const auto buffers = buffersOf(state.shape, topology.team()[local], membership_.size());
    const bool isMe = local == topology.myLocal();
    std::byte* output =
        isMe ? mine(state.output) : team_.outputOf(state.track, local, buffers.outputBytes);
    std::byte* input = output;
    if (!buffers.inPlace) {
      input = isMe ? mine(state.input) : team_.inputOf(state.track, local, buffers.inputBytes);
    }
    binding.mateOutputs.push_back(output);
    binding.mateInputs.push_back(input);
  }
}

// --- watched ----------------------------------------------------------------------------------------------

void Operations::appendOpen(std::vector<calls::CompletionPtr>& open) const {
  for (const auto& state : tracks_) {
    if (state->phase == Phase::Idle) continue;
    for (const Operation& operation : state->operations) open.push_back(operation.completion);
  }
  for (const Operation& operation : pending_) open.push_back(operation.completion);
}

bool Operations::idle() const {
  return pending_.empty() && std::all_of(tracks_.begin(), tracks_.end(), [](const auto& state) {
           return state->phase == Phase::Idle;
         });
}

std::optional<uint64_t> Operations::oldest() const {
  std::optional<uint64_t> oldest;
  if (!pending_.empty()) oldest = pending_.front().sequence;
  for (const auto& state : tracks_) {
    if (state->phase == Phase::Idle) continue;
    const uint64_t sequence = state->operations.front().sequence;
    oldest = std::min(oldest.value_or(sequence), sequence);
  }
  return oldest;
}

std::vector<calls::InFlight> Operations::inFlight() {
  std::vector<calls::InFlight> all;
  for (const auto& state : tracks_) {
    if (state->phase != Phase::Idle) all.push_back(inFlightOf(*state));
  }
  // An operation in the queue waits for those before it, and its deadline may be earlier than theirs.
  if (TrackState* oldest = oldestInFlight()) {
    const auto expired =
        std::ranges::find_if(pending_, [now = process_.clock().now()](const Operation& operation) {
          return operation.deadline.at <= now;
        });
    if (expired != pending_.end()) {
      all.push_back(inFlightOf(*oldest));
      all.back().expired = expired->request.timeout;
    }
  }
  return all;
}

std::optional<calls::InFlight> Operations::inFlightOf(const calls::Completion& completion) {
  const auto is = [&](const Operation& operation) {
    return operation.completion.get() == &completion;
  };
  for (const auto& state : tracks_) {
    const auto& operations = state->operations;
    if (std::any_of(operations.begin(), operations.end(), is)) return inFlightOf(*state);
  }
  // An operation in the queue waits for those that run.
  if (std::none_of(pending_.begin(), pending_.end(), is)) return std::nullopt;
  TrackState* oldest = oldestInFlight();
  return inFlightOf(oldest != nullptr ? *oldest : nextTrack());
}

calls::InFlight Operations::inFlightOf(const TrackState& state) const {
  plans::BlockedStep blocked;
  if (state.phase == Phase::Arrived) {
    blocked.where = "at the arrival";
    blocked.awaited = team_.absent(state.track);
  } else if (state.phase != Phase::Idle) {
    blocked = state.executor.blockedStep();
  }
  calls::InFlight at;
  at.wait = fmt::format("{} for rank{} {}", blocked.where, blocked.awaited.size() == 1 ? "" : "s",
                        membership_.listOf(blocked.awaited));
  at.awaited = std::move(blocked.awaited);
  at.exchanged = blocked.exchanged;
  at.toExchange = blocked.toExchange;
  if (state.phase != Phase::Idle) at.usual = state.entry->recent.median();
  for (const Operation& operation : state.operations) {
    if (at.sequence == 0) {
      at.sequence = operation.sequence;
      at.fingerprint = operation.fingerprint;
    }
    if (!at.expired && operation.deadline.passed(process_.clock())) {
      at.expired = operation.request.timeout;
    }
  }
  return at;
}

void Operations::endWith(Operation& operation, const calls::Break& broken) {
  ended_.keep(std::move(operation.request.keepAlive));
  const std::string what =
      fmt::format("{} #{} (group \"{}\")", membership_.describe(operation.fingerprint),
                  operation.sequence, membership_.name);
  if (metrics_ != nullptr)
    metrics_->countError(toString(operation.request.collective), toString(broken.cause.kind()));
  ended_.finish(*operation.completion, membership_.failed(what, broken.cause));
}

void Operations::endBroken(const calls::Break& broken) {
  process_.ownership().assertOwned();
  for (auto& state : tracks_) {
    auto& operations = state->operations;
    if (operations.empty() || !broken.concerns(operations.front().sequence)) continue;
    if (state->phase == Phase::Running) state->executor.abandon();
    for (Operation& operation : operations) endWith(operation, broken);
    operations.clear();
    state->phase = Phase::Idle;
  }
  while (!pending_.empty() && broken.concerns(pending_.back().sequence)) {
    endWith(pending_.back(), broken);
    pending_.pop_back();
  }
}

}  // namespace smddp::engine::operations
