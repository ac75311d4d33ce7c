// SymbolicRun: the texts of its errors.
#include <fmt/format.h>

#include "plan/print.h"
#include "plan/symbolic_run.h"

namespace smddp::plan {

std::string SymbolicRun::positionOf(const Thread& t, size_t execution, size_t block, int64_t trip,
                                    uint32_t step) const {
  const Plan& plan = executions_[execution].plans[t.rank];
  std::string text = fmt::format("rank {}, ", t.rank);
  if (executions_.size() > 1) text += fmt::format("execution {}, ", execution);
  const std::span<const Block> blocks = blocksOf(t, execution);
  if (t.lane < 0) {
    text += "preamble";
  } else {
    text += fmt::format("stage {}, ", plan.lanes[t.lane].name);
    if (blocks.size() > 1) text += fmt::format("block {}, ", block);
    text += fmt::format("trip {}", trip);
  }
  const Step& found = plan.steps[blocks[block].firstStep + step];
  return text + fmt::format(" ({})", printStepAt(plan, found, trip));
}

// Finds the step that belongs to a moment: a thread's time counts its steps since the run began.
std::string SymbolicRun::nameOf(Epoch at) const {
  const Thread& t = threads_[at.thread];
  size_t e = t.starts.size() - 1;
  while (t.starts[e] >= at.time) --e;
  int64_t step = static_cast<int64_t>(at.time) - t.starts[e] - 1;
  const Plan& plan = executions_[e].plans[t.rank];
  if (t.lane < 0) {
    // The first moment of an execution belongs to the caller, then comes the preamble, then the caller again.
    const std::string caller = fmt::format("the caller of rank {}, ", t.rank);
    if (step == 0) return caller + fmt::format("before execution {},", e);
    if (--step == plan.preamble.numSteps) return caller + fmt::format("after execution {},", e);
  }
  const std::span<const Block> blocks = blocksOf(t, e);
  size_t b = 0;
  while (step >= blocks[b].trips * blocks[b].numSteps) {
    step -= blocks[b].trips * blocks[b].numSteps;
    ++b;
  }
  return positionOf(t, e, b, step / blocks[b].numSteps,
                    static_cast<uint32_t>(step % blocks[b].numSteps));
}

std::string SymbolicRun::nameOf(const ShadowMemory* memory) const {
  for (Rank r = 0; r < topology_.numRanks(); ++r) {
    const RankState& state = ranks_[r];
    if (memory == &state.input) return fmt::format("the input of rank {}", r);
    if (memory == &state.output) return fmt::format("the output of rank {}", r);
    if (memory == &state.residual) return fmt::format("the residual of rank {}", r);
    if (memory == &state.halves[0] || memory == &state.halves[1]) {
      return fmt::format("the slots of rank {}", r);
    }
  }
  for (const auto& [key, channel] : channels_) {
    if (memory != &channel.window) continue;
    return fmt::format("the messages from rank {} to rank {}", channel.from, channel.to);
  }
  return "some memory";
}

std::string SymbolicRun::obstacleOf(const Thread& t, const Step& step) const {
  const int64_t value = step.value.at(t.trip);
  const size_t e = ranks_[t.rank].execution;
  if (step.op == Op::Wait) {
    for (const Rank mate : waitedFor(t, step)) {
      const auto& history = ranks_[mate].counters[step.counter].history;
      const int64_t reached = history.empty() ? 0 : history.back().value;
      if (reached >= stampOf(t, value)) continue;
      const bool isNow = reached >> 32 == static_cast<int64_t>(e);
      return fmt::format("counter {} of rank {} is {}", step.counter, mate,
                         isNow ? reached & 0xffffffff : 0);
    }
  }
  const bool isIncoming = step.op == Op::Receive;
  const Channel& channel = channels_.at(isIncoming ? ChannelKey{step.who, t.rank, step.stream}
                                                   : ChannelKey{t.rank, step.who, step.stream});
  const auto put = static_cast<int64_t>(channel.messages.size()) - channel.base[e];
  if (step.op != Op::Put) return fmt::format("{} messages have been put", put);
  if (put + 1 < value) return fmt::format("{} messages have been put before it", put);
  const int64_t released = channel.releases.empty() ? 0 : channel.releases.back().value;
  return fmt::format("no credit: {} messages put, {} released, window {}", put,
                     released - channel.base[e], limits_.window);
}

std::string SymbolicRun::describeDeadlock() {
  std::string text = "deadlock";
  int listed = 0;
  for (Thread& t : threads_) {
    if (!t.isRunning) continue;
    const Step* step = nextStep(t);
    if (++listed > 4) return text + "; and more";
    text += fmt::format("{} {} waits: {}", listed == 1 ? ":" : ";",
                        positionOf(t, ranks_[t.rank].execution, t.block, t.trip, t.step),
                        obstacleOf(t, *step));
  }
  return text;
}

void SymbolicRun::fail(Verdict::Kind kind, std::string problem) const {
  throw Failure{{kind, std::move(problem)}};
}

void SymbolicRun::failRace(const Thread& t, Place place, const Conflict& conflict,
                           bool writes) const {
  fail(Verdict::Kind::Race,
       fmt::format("{} {} bytes [{}, +{}) of {} that {} {}; nothing orders the two", nameOf(t),
                   writes ? "writes" : "reads", conflict.offset, conflict.length,
                   nameOf(place.memory), nameOf(conflict.earlier.at),
                   conflict.earlierWrites ? "writes" : "reads"));
}

void SymbolicRun::recordWrongData(std::string problem) {
  if (wrongData_.empty()) wrongData_ = std::move(problem);
}

}  // namespace smddp::plan
