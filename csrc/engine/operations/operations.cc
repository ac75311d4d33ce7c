#include "engine/operations/operations.h"

#include <algorithm>
#include <array>

#include "common/config.h"
#include "engine/calls/call.h"
#include "engine/process/wait_policy.h"

namespace smddp::engine::operations {
namespace {

using collectives::Collective;
using enum Event;
using enum Phase;

}  // namespace

// A condition, or an action: of the execution alone, or of all of the group's.
template <typename Result>
struct Operations::Function {
  constexpr Function(Result (Execution::*own)()) : ofExecution(own) {}
  constexpr Function(Result (Operations::*any)(Execution&)) : ofAll(any) {}
  constexpr Function(std::nullptr_t) {}
  bool isGiven() const { return ofExecution != nullptr || ofAll != nullptr; }
  Result operator()(Operations& all, Execution& execution) const {
    return ofExecution != nullptr ? (execution.*ofExecution)() : (all.*ofAll)(execution);
  }

  Result (Execution::*ofExecution)() = nullptr;
  Result (Operations::*ofAll)(Execution&) = nullptr;
};

struct Operations::Transition {
  Event on;
  Phase from, to;
  Function<bool> condition;  // or kAlways
  Function<void> action;     // or kNothing
};

static constexpr std::nullptr_t kAlways = nullptr;
static constexpr std::nullptr_t kNothing = nullptr;

// The life of an execution. At an event it takes the first transition from its phase whose condition holds: in each
// turn of the engine, again and again until there is none; at a break, one.
//
//   Idle        nothing runs on the track
//   Taken       has its operations
//   Arrived     has signalled its arrival; when all have, the plan is chosen, since it depends on the others' buffers
//   Preamble    runs the part of its plan that ends with the arrival of all
//   Met         all ranks of the node have arrived
//   Agreed      they take the same decisions from here on
//   Running     runs the rest of the plan
//   Done        the plan has run
//
// An action or a condition that throws breaks the group from the execution's first operation on (Sentinel::attempt):
// then the execution is still where it was, and the next event is Break.
//
// One way is not in the table: a caller that waits for a small vector while nothing is in flight goes from Idle to Idle
// in runOneShot(), or to Arrived if the other ranks are late. So for the shortest calls no Operation is made, and
// nothing is looked up.
const Operations::Transition Operations::kTransitions[] = {
    // on, from, to, condition, action
    {Turn, Idle, Taken, &Operations::hasNext, &Operations::take},
    // Only a rank with shared buffers waits with its decision. One with private buffers runs the plan for them at once.
    // If a mate's buffers are shared, it learns that at the arrival, and does not use what it has copied.
    {Turn, Taken, Arrived, &Execution::decidesAfterArrival, &Execution::arrive},
    {Turn, Taken, Preamble, kAlways, &Execution::begin},
    {Turn, Arrived, Met, &Execution::allArrived, &Execution::meet},
    {Turn, Preamble, Met, &Execution::isPreambleDone, &Execution::meet},
    // The executor's own turn: as many steps as can be done now.
    {Turn, Preamble, Preamble, &Execution::advancesPlan, kNothing},
    // A mate whose operation has ended with an error may have left, and its buffers may be gone.
    {Turn, Met, Idle, &Operations::isEndedByMate, kNothing},
    {Turn, Met, Agreed, kAlways, &Operations::agree},
    // The plan that has begun may serve what was agreed.
    {Turn, Agreed, Running, &Execution::isPlanRight, kNothing},
    {Turn, Agreed, Running, kAlways, &Execution::chooseAgain},
    {Turn, Running, Done, &Execution::isDone, &Execution::sendGrants},
    {Turn, Running, Running, &Execution::advancesPlan, kNothing},
    // If a mate has ended this operation with an error, it ends with that error here too, even if we have all data:
    // with zero copy the mate may have overwritten its buffer while we read it.
    {Turn, Done, Idle, &Operations::isEndedByMate, kNothing},
    {Turn, Done, Idle, kAlways, &Operations::completeAll},

    // Messages may still arrive in the buffers of a plan that runs.
    {Break, Running, Idle, &Operations::isConcerned, &Operations::abandon},
    // Before a plan runs, it has posted no buffer. (In Idle, this ends an operation whose plan could not be made.)
    {Break, Any, Idle, &Operations::isConcerned, &Operations::end},
};

Operations::Operations(process::Process& process, const team::Membership& membership,
                       team::Team& team, plans::Channels& channels, plans::PlanCache& plans,
                       team::CallHistory& calls, health::Sentinel& sentinel,
                       calls::EndedOperations& ended, observe::Metrics::Group* metrics,
                       int64_t numTracks, int64_t fusionBytes)
    : process_(process),
      membership_(membership),
      team_(team),
      plans_(plans),
      calls_(calls),
      sentinel_(sentinel),
      ended_(ended),
      metrics_(metrics),
      fusionBytes_(fusionBytes) {
  for (int64_t index = 0; index < numTracks; ++index) {
    tracks_.push_back(std::make_unique<Execution>(process_, membership_, team_, channels, plans_,
                                                  metrics_ != nullptr, index));
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
  if (const auto* broken = sentinel_.whyClosedFor(sequence)) return endBroken(*broken);
  sentinel_.attempt(sequence, [&] { calls_.record(sequence, call); });
}

bool Operations::runOneShot(calls::Request& request, const calls::CompletionPtr& completion) {
  process_.ownership().assertOwned();
  const plans::PlanCache::Entry* entry = oneShotPlan(request);
  if (entry == nullptr) return false;
  Execution& state = *tracks_.front();
  const Nanoseconds submittedAt = metrics_ == nullptr ? 0 : process_.clock().now();
  const uint64_t sequence = calls_.begin(*completion);
  const auto call = calls::fingerprint(request);
  ++started_;
  bool isSummed = false;
  sentinel_.attempt(sequence, [&] { isSummed = state.sumAtOnce(*entry, request, call); });
  sentinel_.takeMatesBreaks();
  if (isSummed && sentinel_.whyClosedFor(sequence) == nullptr) {
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
    goOnInTable(state, {std::move(request), completion, deadline, sequence, call, submittedAt});
  }
  team_.bell().ring();
  return true;
}

const plans::PlanCache::Entry* Operations::oneShotPlan(const calls::Request& request) {
  // With several tracks, another execution may still run beside this one.
  if (numTracks() > 1 || sentinel_.whyClosed() != nullptr ||
      request.collective != Collective::AllReduce || request.output.size() != 1) {
    return nullptr;
  }
  const plans::PlanCache::Entry* entry = nullptr;
  // If no algorithm fits, attempt() breaks the group; submit() then ends the operation with that error.
  sentinel_.attempt(calls_.last() + 1, [&] {
    entry = &plans_.get({request.collective, request.bytes});
  });
  return entry != nullptr && entry->start == plans::Start::OneShot ? entry : nullptr;
}

// The other ranks are late, or the group has broken meanwhile.
void Operations::goOnInTable(Execution& state, Operation operation) {
  const uint64_t sequence = operation.sequence;
  state.operations.push_back(std::move(operation));
  state.beganAt = process_.clock().now();
  state.combine();
  state.phase = Arrived;
  if (const auto* broken = sentinel_.whyClosedFor(sequence)) endBroken(*broken);
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
        next.factor != first.factor || bytes > fusionBytes_ || !canFuse(first.bytes, bytes)) {
      break;
    }
    taken.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
}

// True if a request of `first` bytes may become one of `together` bytes in one execution: the same algorithm serves
// both, and it copies before the arrival (one_shot). A rank that has more requests than the others learns that at the
// arrival, when it has copied all of them; what it copied must also serve the plan for fewer.
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
    if (state->phase == Idle) continue;
    advanced |=
        sentinel_.attempt(state->operations.front().sequence, [&] { return advance(*state); });
  }
  while (nextTrack().phase == Idle && hasNext(nextTrack())) {
    advanced |= sentinel_.attempt(pending_.front().sequence, [&] { return advance(nextTrack()); });
  }
  return advanced;
}

// Advances one execution until it can do nothing more, or has ended.
bool Operations::advance(Execution& state) {
  bool advanced = false;
  while (step(Turn, state)) {
    advanced = true;
    if (state.phase == Idle) return true;
  }
  if (metrics_ != nullptr) state.noteWait();
  return advanced;
}

bool Operations::step(Event event, Execution& state) {
  const Phase phase = state.phase;
  for (const Transition& transition : kTransitions) {
    if (transition.from != phase && transition.from != Any) continue;
    if (transition.on != event) continue;
    if (transition.condition.isGiven() && !transition.condition(*this, state)) continue;
    if (transition.action.isGiven()) transition.action(*this, state);
    state.phase = transition.to;
    return true;
  }
  return false;
}

// Only this rank knows where its buffers lie, so others may begin an execution that this one holds back. Executions in
// flight do not need the one that is held back. So they end, and then it begins.
bool Operations::hasNext(Execution&) {
  if (pending_.empty()) return false;
  const Operation& next = pending_.front();
  const bool isBarrier = next.request.collective == Collective::Barrier &&
                         next.request.partOf == calls::PartOf::Itself;
  if (isBarrier) return oldestInFlight() == nullptr;
  return std::ranges::none_of(tracks_, [&](const auto& state) {
    return state->phase != Idle && conflicts(state->operations, next);
  });
}

Execution* Operations::oldestInFlight() {
  Execution* oldest = nullptr;
  for (const auto& state : tracks_) {
    if (state->phase == Idle) continue;
    if (oldest == nullptr ||
        state->operations.front().sequence < oldest->operations.front().sequence) {
      oldest = state.get();
    }
  }
  return oldest;
}

void Operations::take(Execution& state) {
  ++started_;
  state.renew();
  state.beganAt = process_.clock().now();
  state.operations.push_back(std::move(pending_.front()));
  pending_.pop_front();
  takeFusable(state.operations);
  state.combine();
  state.entry = plans::PlanCache::Held(plans_.get(state.shape));
  state.buffers.reset();
  if (state.entry->start == plans::Start::DecideAfterArrival) state.buffers = state.locate();
}

// Takes over what mates have published, which ends the executions that it concerns.
bool Operations::isEndedByMate(Execution& state) {
  std::atomic_thread_fence(std::memory_order_acquire);
  return sentinel_.takeMatesBreaks() && state.phase == Idle;
}

void Operations::agree(Execution& state) {
  state.agreement = team_.agree(state.track);
  state.track.afterArrival = state.agreement.afterArrival;
  auto& operations = state.operations;
  if (state.agreement.fused == operations.size()) return;
  while (operations.size() > state.agreement.fused) {
    pending_.push_front(std::move(operations.back()));
    operations.pop_back();
  }
  // A break that was met earlier may concern the operations that went back to the queue. Nothing else would end them.
  if (const auto* broken = sentinel_.whyClosed()) endBroken(*broken);
  state.combine();
}

void Operations::completeAll(Execution& state) {
  team_.clearBlame();
  state.entry->count(state.operations.size(), state.shape.bytes);
  const Nanoseconds now = process_.clock().now();
  state.entry->recent.add(now - state.beganAt);
  if (metrics_ != nullptr) count(state, now);
  for (Operation& operation : state.operations) {
    ended_.complete(*operation.completion, std::nullopt);
    ended_.release(std::move(operation.request.keepAlive));
  }
  state.operations.clear();
}

void Operations::count(const Execution& state, Nanoseconds now) {
  observe::Metrics::Algorithm& algorithm = *state.entry->metrics;
  for (const Operation& operation : state.operations) {
    const int64_t bytes = operation.request.bytes;
    algorithm.of(bytes).count(now - operation.submittedAt, bytes);
  }
  algorithm.of(state.operations.front().request.bytes)
      .countExecution(state.entry->cached.putBytes, state.waited);
}

// --- watched ----------------------------------------------------------------------------------------------

void Operations::appendOpen(std::vector<calls::CompletionPtr>& open) const {
  for (const auto& state : tracks_) {
    if (state->phase == Idle) continue;
    for (const Operation& operation : state->operations) open.push_back(operation.completion);
  }
  for (const Operation& operation : pending_) open.push_back(operation.completion);
}

bool Operations::idle() const {
  return pending_.empty() && std::all_of(tracks_.begin(), tracks_.end(),
                                         [](const auto& state) { return state->phase == Idle; });
}

std::optional<uint64_t> Operations::oldest() const {
  std::optional<uint64_t> oldest;
  if (!pending_.empty()) oldest = pending_.front().sequence;
  for (const auto& state : tracks_) {
    if (state->phase == Idle) continue;
    const uint64_t sequence = state->operations.front().sequence;
    oldest = std::min(oldest.value_or(sequence), sequence);
  }
  return oldest;
}

std::vector<calls::InFlight> Operations::inFlight() {
  std::vector<calls::InFlight> all;
  for (const auto& state : tracks_) {
    if (state->phase != Idle) all.push_back(state->inFlight());
  }
  // An operation in the queue waits for those before it, and its deadline may be earlier than theirs.
  if (Execution* oldest = oldestInFlight()) {
    const auto expired =
        std::ranges::find_if(pending_, [now = process_.clock().now()](const Operation& operation) {
          return operation.deadline.at <= now;
        });
    if (expired != pending_.end()) {
      all.push_back(oldest->inFlight());
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
    if (std::any_of(operations.begin(), operations.end(), is)) return state->inFlight();
  }
  // An operation in the queue waits for those that run.
  if (std::none_of(pending_.begin(), pending_.end(), is)) return std::nullopt;
  Execution* oldest = oldestInFlight();
  return (oldest != nullptr ? *oldest : nextTrack()).inFlight();
}

void Operations::endWith(Operation& operation, const calls::Break& broken) {
  ended_.keep(std::move(operation.request.keepAlive));
  const std::string what =
      fmt::format("{} #{} (group \"{}\")", membership_.describe(operation.fingerprint),
                  operation.sequence, membership_.name);
  if (metrics_ != nullptr)
    metrics_->countError(toString(operation.request.collective), toString(broken.cause.kind()));
  ended_.complete(*operation.completion, membership_.failed(what, broken.cause));
}

bool Operations::isConcerned(Execution& state) {
  return !state.operations.empty() &&
         sentinel_.whyClosedFor(state.operations.front().sequence) != nullptr;
}

void Operations::end(Execution& state) {
  const calls::Break& broken = *sentinel_.whyClosedFor(state.operations.front().sequence);
  for (Operation& operation : state.operations) endWith(operation, broken);
  state.operations.clear();
}

void Operations::abandon(Execution& state) {
  state.executor.abandon();
  end(state);
}

void Operations::endBroken(const calls::Break& broken) {
  process_.ownership().assertOwned();
  for (auto& state : tracks_) step(Break, *state);
  while (!pending_.empty() && broken.concerns(pending_.back().sequence)) {
    endWith(pending_.back(), broken);
    pending_.pop_back();
  }
}

}  // namespace smddp::engine::operations
