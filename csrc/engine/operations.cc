#include "engine/operations.h"

#include <algorithm>
#include <array>

#include "common/config.h"
#include "engine/call.h"
#include "engine/wait_policy.h"

namespace smddp::engine {
namespace {

using collectives::Collective;

}  // namespace

struct Operations::Transition {
  Phase from, to;
  bool (Operations::*condition)(Execution&);  // or kAlways
  void (Operations::*action)(Execution&);
};

static constexpr auto kAlways = nullptr;

// The life of an execution. From its phase it takes the first transition whose condition holds. An action that finds
// the group broken ends the execution, which is then Idle whatever the table says.
//
//   Idle        nothing runs on the track
//   Taken       has its operations
//   Arriving    has arrived; its plan is chosen when all have, since it depends on the others' buffers
//   Preamble    runs the part of its plan that ends with the arrival of all
//   Running     runs the rest
const Operations::Transition Operations::kTransitions[] = {
    // from           to               condition                   action
    {Phase::Idle, Phase::Taken, &Operations::hasNext, &Operations::take},
    {Phase::Taken, Phase::Arriving, &Operations::mustAskMates, &Operations::arrive},
    {Phase::Taken, Phase::Preamble, kAlways, &Operations::begin},
    {Phase::Arriving, Phase::Running, &Operations::allArrived, &Operations::agree},
    {Phase::Preamble, Phase::Running, &Operations::isPreambleDone, &Operations::agree},
    {Phase::Running, Phase::Idle, &Operations::isDone, &Operations::finish},
};

Operations::Operations(Process& process, const Membership& membership, Team& team,
                       Channels& channels, PlanCache& plans, CallHistory& calls, Sentinel& sentinel,
                       ContinuationQueue& continuations, int64_t numTracks)
    : process_(process),
      membership_(membership),
      team_(team),
      channels_(channels),
      plans_(plans),
      calls_(calls),
      sentinel_(sentinel),
      continuations_(continuations) {
  for (int64_t index = 0; index < numTracks; ++index) {
    executions_.push_back(
        std::make_unique<Execution>(process_.ownership(), membership_, team_, index));
  }
}

// --- submitting -------------------------------------------------------------------------------------------

void Operations::submit(Request request, CompletionPtr completion) {
  process_.ownership().assertOwned();
  const uint64_t sequence = calls_.begin(*completion);
  const auto call = fingerprint(request);
  const Deadline deadline = Deadline::after(process_.clock(), request.timeout);
  pending_.push_back({std::move(request), std::move(completion), deadline, sequence, call});
  if (sentinel_.isBroken(sequence)) return endFrom(*sentinel_.broken());
  sentinel_.attempt(sequence, [&] { calls_.record(sequence, call); });
}

bool Operations::runOneShot(Request& request, const CompletionPtr& completion) {
  process_.ownership().assertOwned();
  Execution& execution = *executions_.front();
  // With several tracks, another execution may still run beside this one.
  if (numTracks() > 1 || sentinel_.broken() || request.collective != Collective::AllReduce ||
      request.output.size() != 1) {
    return false;
  }
  const collectives::Shape shape{request.collective, request.bytes};
  const PlanCache::Entry* entry = nullptr;
  // If no algorithm fits, attempt() breaks the group; submit() then ends the operation with that error.
  sentinel_.attempt(calls_.last() + 1, [&] { entry = &plans_.get(shape); });
  if (entry == nullptr || entry->start != Start::OneShot) return false;
  const uint64_t sequence = calls_.begin(*completion);
  const auto call = fingerprint(request);
  bool isSummed = false;
  sentinel_.attempt(sequence, [&] {
    beginExecution(execution);
    execution.shape = shape;
    execution.entry = PlanCache::Held(*entry);
    team_.prepareStaging(execution.track, static_cast<size_t>(entry->cached.plan.stagingBytes),
                         /*isSent=*/false);
    // bind() must come before publish(). publish() stores into a cache line that the mates hold, so these stores wait
    // in the store buffer. A later load that is wider than one of them cannot be served from the buffer and would wait
    // as well.
    Binding& binding = bind(execution, request, call);
    binding.output = Buffer(request.output.front().data());
    binding.input = binding.output;
    team_.publish(
        execution.track,
        {.fingerprint = call, .ends = {}, .buffers = nullptr, .isNear = entry->cached.fitsNear});
    execution.executor.copyIn(entry->cached);
    team_.arrive(execution.track);
    if (!WaitPolicy::spinUntil([&] { return allArrived(execution); })) return;
    team_.agree(execution.track);
    execution.executor.sum();
    isSummed = true;
  });
  sentinel_.takeMatesBreaks();
  if (!sentinel_.isBroken(sequence) && isSummed) {
    entry->count(1, request.bytes);
    completion->finishUnseen();
  } else {
    const Deadline deadline = Deadline::after(process_.clock(), request.timeout);
    execution.operations.push_back({std::move(request), completion, deadline, sequence, call});
    combine(execution);
    execution.phase = Phase::Arriving;
    if (sentinel_.isBroken(sequence)) endFrom(*sentinel_.broken());
  }
  team_.bell().ring();
  return true;
}

// Small allreduces that wait behind one of the same kind join it. Only inside one node, where the arrival tells how
// many the others have; between nodes that would cost a round trip. And only with one track: with several, another
// execution may still run beside this one.
void Operations::takeFusable(std::vector<Operation>& taken) {
  taken.reserve(kMaxFused);  // `first` stays where it is
  const Request& first = taken.front().request;
  if (numTracks() > 1 || membership_.spansNodes() || first.collective != Collective::AllReduce) {
    return;
  }
  int64_t bytes = first.bytes;
  while (!pending_.empty() && taken.size() < kMaxFused) {
    const Request& next = pending_.front().request;
    bytes += next.bytes;
    if (next.collective != first.collective || next.type != first.type || next.op != first.op ||
        next.factor != first.factor || bytes > settings().fusionBytes ||
        !haveSamePreamble(first.bytes, bytes)) {
      break;
    }
    taken.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
}

// Whether the plans for `one` and for `several` bytes copy in the same way before the arrival. A rank that has more
// requests than the others learns that at the arrival, when it has copied all of them. What it copied must also serve
// the plan for fewer.
bool Operations::haveSamePreamble(int64_t one, int64_t several) {
  const collectives::Choice* first = plans_.get({Collective::AllReduce, one}).choice;
  return first->preamble != collectives::Preamble::Arrive &&
         plans_.get({Collective::AllReduce, several}).choice == first;
}

// --- the life of an execution -----------------------------------------------------------------------------

bool Operations::advance() {
  process_.ownership().assertOwned();
  bool advanced = false;
  for (auto& execution : executions_) {
    if (execution->phase == Phase::Idle) continue;
    advanced |= sentinel_.attempt(execution->operations.front().sequence,
                                  [&] { return advance(*execution); });
  }
  while (nextExecution().phase == Phase::Idle && hasNext(nextExecution())) {
    advanced |=
        sentinel_.attempt(pending_.front().sequence, [&] { return advance(nextExecution()); });
  }
  return advanced;
}

// Advances one execution until it can do nothing more, or has ended.
bool Operations::advance(Execution& execution) {
  bool advanced = false;
  while (step(execution)) {
    advanced = true;
    if (execution.phase == Phase::Idle) break;
  }
  return advanced;
}

bool Operations::step(Execution& execution) {
  const Phase phase = execution.phase;
  const bool hasPlan = phase == Phase::Preamble || phase == Phase::Running;
  const bool advanced = hasPlan && execution.executor.advance();
  for (const Transition& transition : kTransitions) {
    if (transition.from != phase) continue;
    if (transition.condition != kAlways && !(this->*transition.condition)(execution)) continue;
    (this->*transition.action)(execution);
    if (execution.phase == phase) execution.phase = transition.to;
    return true;
  }
  return advanced;
}

bool Operations::hasNext(Execution&) {
  if (pending_.empty()) return false;
  const Request& next = pending_.front().request;
  const bool isBarrier = next.collective == Collective::Barrier && next.partOf == PartOf::Itself;
  return !isBarrier || oldestExecution() == nullptr;
}

Operations::Execution* Operations::oldestExecution() {
  Execution* oldest = nullptr;
  for (const auto& execution : executions_) {
    if (execution->phase == Phase::Idle) continue;
    if (oldest == nullptr ||
        execution->operations.front().sequence < oldest->operations.front().sequence) {
      oldest = execution.get();
    }
  }
  return oldest;
}

void Operations::beginExecution(Execution& execution) {
  ++started_;
  ++execution.track.execution;
  execution.track.afterArrival = false;
  execution.operations.clear();
}

void Operations::take(Execution& execution) {
  beginExecution(execution);
  execution.operations.push_back(std::move(pending_.front()));
  pending_.pop_front();
  takeFusable(execution.operations);
  combine(execution);
  execution.entry = PlanCache::Held(plans_.get(execution.shape));
  execution.buffers.reset();
  if (execution.entry->start == Start::AskMates) execution.buffers = locate(execution);
}

// Only a rank with shared buffers asks. One with private buffers runs the plan for them at once. If a mate's buffers
// are shared, it learns that at the arrival, and does not use what it has copied.
bool Operations::mustAskMates(Execution& execution) { return execution.buffers.has_value(); }

void Operations::arrive(Execution& execution) {
  publish(execution);
  team_.arrive(execution.track);
}

void Operations::begin(Execution& execution) {
  publish(execution);
  run(execution, /*arrived=*/false);
}

// All have arrived: from here on all ranks of the node take the same decisions.
void Operations::agree(Execution& execution) {
  // A mate whose operation has ended with an error may have left, and its buffers may be gone.
  if (sentinel_.takeMatesBreaks() && execution.phase == Phase::Idle) return;
  const Agreement agreement = team_.agree(execution.track);
  auto& operations = execution.operations;
  const bool takesFewer = agreement.fused < operations.size();
  while (operations.size() > agreement.fused) {
    pending_.push_front(std::move(operations.back()));
    operations.pop_back();
  }
  if (takesFewer) {
    // A break that was met earlier may concern the operations that went back to the queue. Nothing else would end them.
    if (sentinel_.broken()) endFrom(*sentinel_.broken());
    combine(execution);
  }
  const bool copiedInVain =
      agreement.afterArrival && execution.entry->choice->preamble != collectives::Preamble::Arrive;
  execution.track.afterArrival = agreement.afterArrival;
  if (execution.phase == Phase::Preamble && !takesFewer && !copiedInVain) return;
  execution.shape.shared = agreement.shared;
  execution.shape.afterArrival = agreement.afterArrival;
  execution.entry = PlanCache::Held(plans_.get(execution.shape));
  run(execution, /*arrived=*/true);
}

void Operations::finish(Execution& execution) {
  if (membership_.spansNodes()) channels_.flushGrants(execution.track);
  // If a mate has ended this operation with an error, it ends with that error here too, even if we have all data: with
  // zero copy the mate may have overwritten its buffer while we read it.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (sentinel_.takeMatesBreaks() && execution.phase == Phase::Idle) return;
  team_.clearBlame();
  execution.entry->count(execution.operations.size(), execution.shape.bytes);
  for (Operation& operation : execution.operations) {
    continuations_.finish(*operation.completion, std::nullopt);
  }
  execution.operations.clear();
}

// --- buffers and plans ------------------------------------------------------------------------------------

// Sets the shape and the buffers of the execution: those of all its operations, one behind the other.
void Operations::combine(Execution& execution) {
  const Request& first = execution.operations.front().request;
  execution.shape = {first.collective, 0, first.root, /*shared=*/false};
  execution.input.clear();
  execution.output.clear();
  const auto append = [](Pieces& to, const Pieces& from) {
    std::copy_if(from.begin(), from.end(), std::back_inserter(to),
                 [](const auto& piece) { return !piece.empty(); });
  };
  for (const Operation& operation : execution.operations) {
    execution.shape.bytes += operation.request.bytes;
    append(execution.input, operation.request.input);
    append(execution.output, operation.request.output);
  }
}

// Where mates find this rank's buffers, if all of them lie in communication memory.
std::optional<BufferLocations> Operations::locate(const Execution& execution) const {
  BufferLocations locations;
  const auto found = [&](const Pieces& pieces, transport::shm::Location& at) {
    if (pieces.size() != 1) return false;
    const auto where =
        process_.memory().tensors->locate(pieces.front().data(), pieces.front().size());
    if (where) at = *where;
    return where.has_value();
  };
  const auto buffers = buffersOf(execution.shape, membership_.me(), membership_.size());
  const bool hasInput = buffers.inputBytes > 0 && !buffers.inPlace;
  if (execution.shape.bytes == 0) return std::nullopt;
  if (buffers.outputBytes > 0 && !found(execution.output, locations.output)) return std::nullopt;
  if (hasInput && !found(execution.input, locations.input)) return std::nullopt;
  return locations;
}

void Operations::publish(Execution& execution) {
  const auto& operations = execution.operations;
  std::array<uint32_t, kMaxFused> ends;
  uint32_t end = 0;
  for (size_t i = 0; i < operations.size(); ++i) {
    ends[i] = end += static_cast<uint32_t>(operations[i].request.bytes);
  }
  const size_t fusable = operations.size() > 1 ? operations.size() : 0;
  team_.publish(execution.track, {.fingerprint = operations.front().call,
                                  .ends = std::span(ends).first(fusable),
                                  .buffers = execution.buffers ? &*execution.buffers : nullptr,
                                  .isNear = execution.entry->cached.fitsNear});
}

// Starts the execution's plan, after its preamble if all have `arrived`. (runOneShot() starts none.)
void Operations::run(Execution& execution, bool arrived) {
  const CachedPlan& cached = execution.entry->cached;
  team_.prepareStaging(execution.track, static_cast<size_t>(cached.plan.stagingBytes),
                       cached.putsStaging);
  channels_.open(execution.track, cached);
  const Operation& first = execution.operations.front();
  Binding& binding = bind(execution, first.request, first.call);
  binding.output = Buffer(execution.output);
  const auto buffers = buffersOf(execution.shape, membership_.me(), membership_.size());
  binding.input = Buffer(buffers.inPlace ? execution.output : execution.input);
  if (execution.shape.shared) bindMates(execution, binding);
  execution.executor.start(cached, arrived);
}

// Fills in what does not depend on buffers. The caller adds input and output.
Binding& Operations::bind(Execution& execution, const Request& request,
                          const transport::CallFingerprint& call) const {
  Binding& binding = execution.executor.binding();
  binding.type = request.type;
  binding.op = request.op;
  binding.scale.factor = request.factor;
  binding.scale.divisor = membership_.size();
  binding.call = call;
  binding.mateOutputs.clear();
  binding.mateInputs.clear();
  return binding;
}

void Operations::bindMates(Execution& execution, Binding& binding) const {
  const plan::Topology& topology = membership_.topology;
  const auto mine = [](const Pieces& pieces) {
    return pieces.empty() ? nullptr : pieces.front().data();
  };
  for (int local = 0; local < topology.teamSize(); ++local) {
    const auto buffers = buffersOf(execution.shape, topology.team()[local], membership_.size());
    const bool isMe = local == topology.myLocal();
    std::byte* output =
        isMe ? mine(execution.output) : team_.outputOf(execution.track, local, buffers.outputBytes);
    std::byte* input = output;
    if (!buffers.inPlace) {
      input =
          isMe ? mine(execution.input) : team_.inputOf(execution.track, local, buffers.inputBytes);
    }
    binding.mateOutputs.push_back(output);
    binding.mateInputs.push_back(input);
  }
}

// --- watched ----------------------------------------------------------------------------------------------

void Operations::appendOpen(std::vector<CompletionPtr>& open) const {
  for (const auto& execution : executions_) {
    if (execution->phase == Phase::Idle) continue;
    for (const Operation& operation : execution->operations) open.push_back(operation.completion);
  }
  for (const Operation& operation : pending_) open.push_back(operation.completion);
}

bool Operations::idle() const {
  return pending_.empty() &&
         std::all_of(executions_.begin(), executions_.end(),
                     [](const auto& execution) { return execution->phase == Phase::Idle; });
}

std::optional<uint64_t> Operations::oldest() const {
  std::optional<uint64_t> oldest;
  if (!pending_.empty()) oldest = pending_.front().sequence;
  for (const auto& execution : executions_) {
    if (execution->phase == Phase::Idle) continue;
    const uint64_t sequence = execution->operations.front().sequence;
    oldest = std::min(oldest.value_or(sequence), sequence);
  }
  return oldest;
}

std::vector<Standstill> Operations::standstills() {
  std::vector<Standstill> all;
  for (const auto& execution : executions_) {
    if (execution->phase != Phase::Idle) all.push_back(standstillOf(*execution));
  }
  // An operation in the queue waits for those that run, and its deadline may be earlier than theirs.
  Execution* oldest = oldestExecution();
  if (oldest != nullptr && !pending_.empty() &&
      pending_.front().deadline.passed(process_.clock())) {
    all.push_back(standstillOf(*oldest));
    all.back().expired = pending_.front().request.timeout;
  }
  return all;
}

std::optional<Standstill> Operations::standstillOf(const Completion& completion) {
  const auto is = [&](const Operation& operation) {
    return operation.completion.get() == &completion;
  };
  for (const auto& execution : executions_) {
    const auto& operations = execution->operations;
    if (std::any_of(operations.begin(), operations.end(), is)) return standstillOf(*execution);
  }
  // An operation in the queue waits for those that run.
  if (std::none_of(pending_.begin(), pending_.end(), is)) return std::nullopt;
  Execution* oldest = oldestExecution();
  return standstillOf(oldest != nullptr ? *oldest : nextExecution());
}

Standstill Operations::standstillOf(const Execution& execution) const {
  Stall stall;
  if (execution.phase == Phase::Arriving) {
    stall.where = "at the arrival";
    stall.awaited = team_.absent(execution.track);
  } else if (execution.phase != Phase::Idle) {
    stall = execution.executor.stall();
  }
  std::string ranks;
  for (const Rank rank : stall.awaited) {
    ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", rank);
  }
  Standstill at;
  at.wait =
      fmt::format("{} for rank{} {}", stall.where, stall.awaited.size() == 1 ? "" : "s", ranks);
  at.awaited = std::move(stall.awaited);
  at.moved = stall.moved;
  at.toMove = stall.toMove;
  for (const Operation& operation : execution.operations) {
    if (at.sequence == 0) {
      at.sequence = operation.sequence;
      at.call = operation.call;
    }
    if (!at.expired && operation.deadline.passed(process_.clock())) {
      at.expired = operation.request.timeout;
    }
  }
  return at;
}

void Operations::endWith(Operation& operation, const Break& broken) {
  continuations_.keep(std::move(operation.request.keepAlive));
  const std::string what = fmt::format("{} #{} (group \"{}\")", describe(operation.call),
                                       operation.sequence, membership_.name);
  continuations_.finish(*operation.completion, membership_.failed(what, broken.cause));
}

void Operations::endFrom(const Break& broken) {
  process_.ownership().assertOwned();
  for (auto& execution : executions_) {
    auto& operations = execution->operations;
    if (operations.empty() || !broken.concerns(operations.front().sequence)) continue;
    for (Operation& operation : operations) endWith(operation, broken);
    operations.clear();
    execution->phase = Phase::Idle;
  }
  while (!pending_.empty() && broken.concerns(pending_.back().sequence)) {
    endWith(pending_.back(), broken);
    pending_.pop_back();
  }
}

}  // namespace smddp::engine
