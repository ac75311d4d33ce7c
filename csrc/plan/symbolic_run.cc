#include "plan/symbolic_run.h"

#include <algorithm>

#include <fmt/format.h>

namespace smddp::plan {

SymbolicRun::SymbolicRun(const std::vector<std::vector<Rank>>& nodes, const Limits& limits,
                         std::span<const Execution> executions, bool usesPosts)
    : topology_(nodes, 0),
      limits_(limits),
      executions_(executions),
      usesPosts_(usesPosts),
      ranks_(static_cast<size_t>(topology_.numRanks())),
      orders_(executions.size()),
      oneOrder_(executions.size(), kUndefined) {
  for (Rank r = 0; r < topology_.numRanks(); ++r) {
    size_t lanes = 0;
    for (const Execution& e : executions) lanes = std::max(lanes, e.plans[r].lanes.size());
    ranks_[r].firstThread = static_cast<uint32_t>(threads_.size());
    for (size_t i = 0; i <= lanes; ++i) {
      Thread t;
      t.rank = r;
      t.lane = static_cast<int>(i) - 1;
      threads_.push_back(std::move(t));
    }
  }
  for (uint32_t i = 0; i < threads_.size(); ++i) {
    threads_[i].clock = VectorClock(threads_.size(), i);
  }
  for (size_t e = 0; e < executions.size(); ++e) {
    for (Rank r = 0; r < topology_.numRanks(); ++r) {
      for (const ChannelUse& use : executions[e].plans[r].channels) {
        Channel& channel = channels_[{r, use.peer, use.stream}];
        channel.from = r;
        channel.to = use.peer;
        channel.stream = use.stream;
        channel.base.resize(executions.size() + 1, 0);
        for (size_t later = e + 1; later <= executions.size(); ++later) {
          channel.base[later] += use.puts;
        }
      }
    }
  }
}

size_t SymbolicRun::numThreadsOf(Rank rank) const {
  const bool isLast = rank + 1 == topology_.numRanks();
  const size_t end = isLast ? threads_.size() : ranks_[rank + 1].firstThread;
  return end - ranks_[rank].firstThread;
}

Verdict SymbolicRun::go() {
  try {
    if (executions_.empty()) return {};
    for (Rank r = 0; r < topology_.numRanks(); ++r) begin(r);
    while (!ready_.empty()) {
      const uint32_t next = ready_.front();
      ready_.pop_front();
      advance(next);
    }
    for (const RankState& rank : ranks_) {
      if (rank.execution == executions_.size()) continue;
      return {Verdict::Kind::Deadlock, describeDeadlock()};
    }
  } catch (const Failure& failure) {
    return failure.verdict;
  }
  if (!wrongData_.empty()) return {Verdict::Kind::WrongData, wrongData_};
  return {};
}

void SymbolicRun::begin(Rank rank) {
  RankState& state = ranks_[rank];
  if (state.execution == executions_.size()) return;
  for (size_t i = 0; i < numThreadsOf(rank); ++i) {
    Thread& t = threads_[state.firstThread + i];
    t.starts.push_back(t.clock.now().time);
    t.block = t.step = 0;
    t.trip = 0;
  }
  Thread& t = threads_[state.firstThread];
  t.clock.tick();
  callerWrites(rank, true);
  t.isRunning = true;
  ready_.push_back(state.firstThread);
}

void SymbolicRun::launchLanes(Rank rank) {
  RankState& state = ranks_[rank];
  Thread& preamble = threads_[state.firstThread];
  preamble.isRunning = false;
  state.lanesLeft = static_cast<int>(planOf(preamble).lanes.size());
  for (int i = 0; i < state.lanesLeft; ++i) {
    Thread& t = threads_[state.firstThread + 1 + i];
    t.clock.join(preamble.clock);
    t.isRunning = true;
    ready_.push_back(state.firstThread + 1 + i);
  }
  if (state.lanesLeft == 0) finish(rank);
}

// The call returns on this rank. Its caller reads the result, overwrites the buffers, and makes the next call.
void SymbolicRun::finish(Rank rank) {
  RankState& state = ranks_[rank];
  Thread& t = threads_[state.firstThread];
  for (size_t i = 1; i < numThreadsOf(rank); ++i) {
    t.clock.join(threads_[state.firstThread + i].clock);
  }
  t.clock.tick();
  requireAllBegun(rank);
  requireChannelsMoved(rank);
  requireOutputs(rank);
  callerWrites(rank, false);
  ++state.execution;
  forget(rank);
  begin(rank);
}

void SymbolicRun::requireAllBegun(Rank rank) {
  if (!executionOf(rank).isBarrier) return;
  const size_t e = ranks_[rank].execution;
  for (Rank other = 0; other < topology_.numRanks(); ++other) {
    const uint32_t thread = ranks_[other].firstThread;
    const auto& starts = threads_[thread].starts;
    const bool begun = starts.size() > e &&
                       threads_[ranks_[rank].firstThread].clock.includes({thread, starts[e] + 1});
    if (begun) continue;
    fail(Verdict::Kind::Malformed, fmt::format("rank {} leaves the barrier (execution {}) before "
                                               "rank {} is known to have entered",
                                               rank, e, other));
  }
}

// Both ends of a channel must use as many messages as the plans declare. Otherwise the next execution would use
// wrong message numbers.
void SymbolicRun::requireChannelsMoved(Rank rank) {
  const size_t e = ranks_[rank].execution;
  for (const ChannelUse& use : executionOf(rank).plans[rank].channels) {
    const Channel& out = channels_.at({rank, use.peer, use.stream});
    const Channel& in = channels_.at({use.peer, rank, use.stream});
    const auto put = static_cast<int64_t>(out.messages.size());
    const int64_t released = in.releases.empty() ? 0 : in.releases.back().value;
    if (put != out.base[e + 1] || released != in.base[e + 1]) {
      fail(Verdict::Kind::Malformed,
           fmt::format("rank {} ends execution {} after {} puts to rank {} and {} releases, "
                       "declared are {} and {} (stream {})",
                       rank, e, put - out.base[e], use.peer, released - in.base[e], use.puts,
                       use.receives, use.stream));
    }
  }
}

// Drops clocks that no later step can need. In a long run they would take most of the memory.
void SymbolicRun::forget(Rank rank) {
  const auto& team = topology_.node(topology_.nodeOf(rank));
  size_t ended = executions_.size();
  for (const Rank mate : team) ended = std::min(ended, ranks_[mate].execution);
  for (const Rank mate : team) {
    for (Counter& counter : ranks_[mate].counters) {
      auto& history = counter.history;
      const auto keep = std::find_if(history.begin(), history.end(), [&](const Signalled& s) {
        return s.value >= static_cast<int64_t>(ended) << 32;
      });
      if (history.begin() != keep) history.erase(history.begin(), keep);
    }
  }
  for (const ChannelUse& use : executions_[ranks_[rank].execution - 1].plans[rank].channels) {
    const size_t both = std::min(ranks_[rank].execution, ranks_[use.peer].execution);
    for (const ChannelKey& key :
         {ChannelKey{rank, use.peer, use.stream}, ChannelKey{use.peer, rank, use.stream}}) {
      const Channel& channel = channels_.at(key);
      for (int64_t m = both == 0 ? 0 : channel.base[both - 1]; m < channel.base[both]; ++m) {
        messages_[channel.messages[m]].sent = {};
        messages_[channel.messages[m]].contents = {};
      }
    }
  }
}

std::span<const Block> SymbolicRun::blocksOf(const Thread& t, size_t execution) const {
  const Plan& plan = executions_[execution].plans[t.rank];
  if (t.lane < 0) return {&plan.preamble, 1};
  return plan.lanes[t.lane].blocks;
}

const Step* SymbolicRun::nextStep(Thread& t) const {
  const auto blocks = blocksOf(t);
  while (t.block < blocks.size() &&
         (blocks[t.block].numSteps == 0 || t.trip == blocks[t.block].trips)) {
    ++t.block;
    t.trip = 0;
  }
  if (t.block == blocks.size()) return nullptr;
  return &planOf(t).steps[blocks[t.block].firstStep + t.step];
}

void SymbolicRun::moveOn(Thread& t) const {
  if (++t.step < blocksOf(t)[t.block].numSteps) return;
  t.step = 0;
  ++t.trip;
}

// Runs a thread until it must wait or has ended. The thread's time counts its steps, so a time identifies a step.
void SymbolicRun::advance(uint32_t thread) {
  Thread& t = threads_[thread];
  while (const Step* step = nextStep(t)) {
    if (!isReady(thread, *step)) return;
    t.clock.tick();
    perform(t, *step);
    moveOn(t);
  }
  if (t.lane < 0) return launchLanes(t.rank);
  t.isRunning = false;
  if (--ranks_[t.rank].lanesLeft == 0) finish(t.rank);
}

void SymbolicRun::wake(std::vector<uint32_t>& waiting) {
  ready_.insert(ready_.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

}  // namespace smddp::plan
