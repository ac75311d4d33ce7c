#include "engine/operations/execution.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <span>

#include "engine/process/wait_policy.h"

namespace smddp::engine::operations {

Execution::Execution(process::Process& process, const team::Membership& membership,
                     team::Team& team, plans::Channels& channels, plans::PlanCache& plans,
                     bool isCounted, int64_t index)
    : track(team.makeTrack(index)),
      executor(process.ownership(), membership, track, team.bell()),
      process_(process),
      membership_(membership),
      team_(team),
      channels_(channels),
      plans_(plans),
      isCounted_(isCounted) {}

void Execution::renew() {
  ++track.executionNumber;
  track.afterArrival = false;
  waited = {};
  waitsSince = 0;
  operations.clear();
  plannedFor = 0;
}

void Execution::arrive() {
  publish();
  team_.arrive(track);
}

void Execution::begin() {
  publish();
  startPlan(/*arrived=*/false);
}

bool Execution::advancesPlan() {
  const bool advanced = executor.advance();
  if (executor.hasReceived()) endWait(waited.network);
  return advanced;
}

bool Execution::isPlanRight() {
  const bool hasCopied = entry->choice->preamble != collectives::Preamble::NoCopy;
  return plannedFor == operations.size() && !(agreement.afterArrival && hasCopied);
}

void Execution::chooseAgain() {
  shape.shared = agreement.shared;
  shape.afterArrival = agreement.afterArrival;
  entry = plans::PlanCache::Held(plans_.get(shape));
  startPlan(/*arrived=*/true);
}

void Execution::sendGrants() {
  if (membership_.spansNodes()) channels_.sendGrantsNow(track);
}

bool Execution::sumAtOnce(const plans::PlanCache::Entry& oneShot, const calls::Request& request,
                          const transport::CallFingerprint& call) {
  renew();
  shape = oneShot.shape;
  entry = plans::PlanCache::Held(oneShot);
  team_.prepareStaging(track, static_cast<size_t>(oneShot.cached.plan.stagingBytes),
                       /*isSent=*/false);
  // bind() must come before publish(). publish() stores into a cache line that the mates hold, so these stores wait in
  // the store buffer. A later load that is wider than one of them cannot be served from the buffer and would wait as
  // well.
  plans::Binding& binding = bind(request, call);
  binding.output = calls::Buffer(request.output.front().data());
  binding.input = binding.output;
  team_.publish(
      track,
      {.fingerprint = call, .ends = {}, .buffers = nullptr, .isNear = oneShot.cached.fitsNear});
  executor.copyIn(oneShot.cached);
  team_.arrive(track);
  const auto arrived = [&] { return allArrived(); };
  if (isCounted_ && !arrived()) waitsSince = process_.clock().now();
  if (!process::WaitPolicy::spinUntil(arrived)) return false;
  meet();
  team_.agree(track);
  executor.sum();
  return true;
}

// --- buffers and plans ------------------------------------------------------------------------------------

void Execution::combine() {
  const calls::Request& first = operations.front().request;
  shape = {first.collective, 0, first.root, /*shared=*/false};
  input.clear();
  output.clear();
  const auto append = [](calls::Pieces& to, const calls::Pieces& from) {
    std::copy_if(from.begin(), from.end(), std::back_inserter(to),
                 [](const auto& piece) { return !piece.empty(); });
  };
  for (const Operation& operation : operations) {
    shape.bytes += operation.request.bytes;
    append(input, operation.request.input);
    append(output, operation.request.output);
  }
  shape.wire = plans_.wireFor(first, shape.bytes);
  shape.feedback = shape.wire != Wire::fp32 && first.residual != nullptr;
}

std::optional<memory::BufferLocations> Execution::locate() const {
  memory::BufferLocations locations;
  const auto found = [&](const calls::Pieces& pieces, transport::shm::Location& at) {
    if (pieces.size() != 1) return false;
    const auto where =
        process_.memory().tensors->locate(pieces.front().data(), pieces.front().size());
    if (where) at = *where;
    return where.has_value();
  };
  const auto buffers = buffersOf(shape, membership_.me(), membership_.size());
  const bool hasInput = buffers.inputBytes > 0 && !buffers.inPlace;
  if (shape.bytes == 0) return std::nullopt;
  if (buffers.outputBytes > 0 && !found(output, locations.output)) return std::nullopt;
  if (hasInput && !found(input, locations.input)) return std::nullopt;
  return locations;
}

void Execution::publish() {
  std::array<uint32_t, memory::kMaxFused> ends;
  uint32_t end = 0;
  for (size_t i = 0; i < operations.size(); ++i) {
    ends[i] = end += static_cast<uint32_t>(operations[i].request.bytes);
  }
  const size_t fusable = operations.size() > 1 ? operations.size() : 0;
  team_.publish(track, {.fingerprint = operations.front().fingerprint,
                        .ends = std::span(ends).first(fusable),
                        .buffers = buffers ? &*buffers : nullptr,
                        .isNear = entry->cached.fitsNear});
}

void Execution::startPlan(bool arrived) {
  const plans::CachedPlan& cached = entry->cached;
  team_.prepareStaging(track, static_cast<size_t>(cached.plan.stagingBytes), cached.putsStaging);
  channels_.open(track, cached);
  const Operation& first = operations.front();
  plans::Binding& binding = bind(first.request, first.fingerprint);
  binding.output = calls::Buffer(output);
  const auto buffers = buffersOf(shape, membership_.me(), membership_.size());
  binding.input = calls::Buffer(buffers.inPlace ? output : input);
  if (shape.shared) bindMates(binding);
  plannedFor = operations.size();
  executor.start(cached, arrived);
}

plans::Binding& Execution::bind(const calls::Request& request,
                                const transport::CallFingerprint& call) {
  plans::Binding& binding = executor.binding();
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

void Execution::bindMates(plans::Binding& binding) const {
  const plan::Topology& topology = membership_.topology;
  const auto mine = [](const calls::Pieces& pieces) {
    return pieces.empty() ? nullptr : pieces.front().data();
  };
  for (int local = 0; local < topology.teamSize(); ++local) {
    const auto buffers = buffersOf(shape, topology.team()[local], membership_.size());
    const bool isMe = local == topology.myLocal();
    std::byte* output =
        isMe ? mine(this->output) : team_.outputOf(track, local, buffers.outputBytes);
    std::byte* input = output;
    if (!buffers.inPlace) {
      input = isMe ? mine(this->input) : team_.inputOf(track, local, buffers.inputBytes);
    }
    binding.mateOutputs.push_back(output);
    binding.mateInputs.push_back(input);
  }
}

// --- waits ------------------------------------------------------------------------------------------------

// Two waits are told apart: for the last rank of this node to arrive, and then for the first data of another node.
void Execution::noteWait() {
  if (waitsSince != 0) return;
  const bool isOver = !membership_.spansNodes() || executor.hasReceived();
  if (phase == Phase::Running && isOver) return;
  waitsSince = process_.clock().now();
}

void Execution::endWait(Nanoseconds& ended) {
  if (waitsSince == 0) return;
  ended += process_.clock().now() - waitsSince;
  waitsSince = 0;
}

calls::InFlight Execution::inFlight() const {
  plans::BlockedStep blocked;
  if (phase == Phase::Arrived) {
    blocked.where = "at the arrival";
    blocked.awaited = team_.absent(track);
  } else if (phase != Phase::Idle) {
    blocked = executor.blockedStep();
  }
  calls::InFlight at;
  at.wait = fmt::format("{} for rank{} {}", blocked.where, blocked.awaited.size() == 1 ? "" : "s",
                        membership_.listOf(blocked.awaited));
  at.awaited = std::move(blocked.awaited);
  at.exchanged = blocked.exchanged;
  at.toExchange = blocked.toExchange;
  if (phase != Phase::Idle) at.usual = entry->recent.median();
  for (const Operation& operation : operations) {
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

}  // namespace smddp::engine::operations
