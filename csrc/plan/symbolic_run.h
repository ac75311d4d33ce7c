// The symbolic interpreter behind check(): it runs the plans of all ranks until no lane can go on.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "plan/checker.h"
#include "plan/expression.h"
#include "plan/shadow_memory.h"
#include "plan/topology.h"
#include "plan/vector_clock.h"

namespace smddp::plan {

// Runs well-formed plans (findMalformation) once. Used by one thread, for one go(). The first race or broken
// rule ends the run. Wrong contents are recorded and the run goes on, because it may still find the race that
// caused them.
class SymbolicRun {
 public:
  // `usesPosts`: messages arrive where they are posted. Otherwise posts have no effect.
  SymbolicRun(const std::vector<std::vector<Rank>>& nodes, const Limits& limits,
              std::span<const Execution> executions, bool usesPosts);
  Verdict go();

 private:
  struct Failure {
    Verdict verdict;
  };
  // A simulated thread. Thread 0 of a rank acts as the caller and runs the preambles; thread i + 1 runs lane i.
  struct Thread {
    Rank rank = 0;
    int lane = 0;
    VectorClock clock;
    bool isRunning = false;
    size_t block = 0;
    int64_t trip = 0;
    uint32_t step = 0;
    std::vector<uint32_t> starts;  // the thread's time before each execution
  };
  // A new value of a counter, and the clock of the step that set it. Team counters have the number of the
  // execution in the upper 32 bits.
  struct Signalled {
    int64_t value = 0;
    VectorClock clock;
  };
  struct Counter {
    std::vector<Signalled> history;
    std::vector<uint32_t> waiting;
  };
  struct Place {
    ShadowMemory* memory = nullptr;
    int64_t offset = 0;
  };
  // Where a message may arrive, and the clock of the step that said so.
  struct Posted {
    Place place;
    int64_t length = 0;
    VectorClock clock;
    bool hasArrived = false;
  };
  struct Channel {
    Rank from = 0;
    Rank to = 0;
    int stream = 0;
    std::vector<int64_t> base;       // messages before each execution
    std::vector<uint32_t> messages;  // into messages_
    std::deque<Signalled>
        releases;  // over all executions, without those that no later put can need
    ShadowMemory window;
    std::map<int64_t, Posted> posted;  // by message, until it is released
    std::vector<uint32_t> waiting;
  };
  struct RankState {
    std::array<Counter, kNumCounters> counters;
    ShadowMemory input;
    ShadowMemory output;  // also the input of executions in place
    ShadowMemory residual;
    std::array<ShadowMemory, 2> halves;
    uint32_t firstThread = 0;
    size_t execution = 0;
    int lanesLeft = 0;
  };
  using ChannelKey = std::tuple<Rank, Rank, int>;  // from, to, stream

  // How an execution begins, advances and ends: symbolic_run.cc.
  void begin(Rank rank);
  void launchLanes(Rank rank);
  void finish(Rank rank);
  void requireAllBegun(Rank rank);
  void requireChannelsMoved(Rank rank);
  void forget(Rank rank);
  void advance(uint32_t thread);
  void wake(std::vector<uint32_t>& waiting);
  std::span<const Block> blocksOf(const Thread& t, size_t execution) const;
  std::span<const Block> blocksOf(const Thread& t) const {
    return blocksOf(t, ranks_[t.rank].execution);
  }
  const Step* nextStep(Thread& t) const;
  void moveOn(Thread& t) const;

  // Steps that synchronise: symbolic_steps.cc.
  bool isReady(uint32_t thread, const Step& step);
  void perform(Thread& t, const Step& step);
  void signal(Thread& t, const Step& step, int64_t value);
  void wait(Thread& t, const Step& step, int64_t value);
  void put(Thread& t, const Step& step, int64_t value);
  void post(Thread& t, const Step& step, int64_t value);
  void receive(Thread& t, const Step& step, int64_t value);
  void release(Thread& t, const Step& step, int64_t value);
  void flush(Thread& t, const Step& step, int64_t value);
  Channel& outgoing(const Thread& t, const Step& step);
  Channel& incoming(const Thread& t, const Step& step);
  std::vector<Rank> waitedFor(const Thread& t, const Step& step) const;
  int64_t stampOf(const Thread& t, int64_t value) const;

  // Steps that move bytes, and the check of the outputs: symbolic_moves.cc.
  void copy(Thread& t, const Step& step);
  void reduce(Thread& t, const Step& step);
  void transmit(Thread& t, const Step& step, Channel& channel, uint32_t message);
  void arrive(Posted& posted, uint32_t message);
  Place resolve(const Thread& t, const Ref& ref, int64_t length);
  Place bufferOf(Rank rank, size_t execution, bool isInput);
  void requireApart(const Thread& t, const Step& step);
  void read(const Thread& t, Place place, int64_t length, const Access& access,
            std::vector<Piece>& pieces);
  void write(const Thread& t, Place place, int64_t length, const Access& access,
             const std::vector<Piece>& pieces);
  void readElements(const Thread& t, const Step& step, const Ref& ref, std::vector<Piece>& pieces);
  void writeElements(const Thread& t, const Step& step, std::vector<Piece> pieces);
  void useResidual(const Thread& t, const Step& step, const std::vector<Piece>& pieces);
  Term operand(const Thread& t, const Step& step, Term value);
  void callerWrites(Rank rank, bool isBefore);
  void requireOutputs(Rank rank);
  void requireOutput(Rank rank, const Expectation& expected);
  void requireSum(Rank rank, const Expectation& expected, int64_t offset, const Piece& piece);
  void requireSameOrder(const Expectation& expected, const std::vector<Piece>& pieces);

  // Error texts: symbolic_errors.cc.
  std::string nameOf(Epoch at) const;
  std::string nameOf(const Thread& t) const { return nameOf(t.clock.now()); }
  std::string nameOf(const ShadowMemory* memory) const;
  std::string positionOf(const Thread& t, size_t execution, size_t block, int64_t trip,
                         uint32_t step) const;
  std::string obstacleOf(const Thread& t, const Step& step) const;
  std::string describeDeadlock();
  [[noreturn]] void fail(Verdict::Kind kind, std::string problem) const;
  [[noreturn]] void failRace(const Thread& t, Place place, const Conflict& conflict,
                             bool writes) const;
  void recordWrongData(std::string problem);

  const Plan& planOf(const Thread& t) const {
    return executions_[ranks_[t.rank].execution].plans[t.rank];
  }
  const Execution& executionOf(Rank rank) const { return executions_[ranks_[rank].execution]; }
  size_t numThreadsOf(Rank rank) const;

  const Topology topology_;
  const Limits limits_;
  const std::span<const Execution> executions_;
  const bool usesPosts_;
  std::vector<RankState> ranks_;
  std::vector<Thread> threads_;
  std::map<ChannelKey, Channel> channels_;
  std::vector<Message> messages_;
  std::deque<uint32_t> ready_;
  Expressions expressions_;
  std::string wrongData_;
  // Per execution: the order of summation of the rank that ended first, by (offset in the inputs, length).
  std::vector<std::map<std::pair<int64_t, int64_t>, std::vector<Piece>>> orders_;
  std::vector<ExpressionId> oneOrder_;
  std::map<std::tuple<const Expectation*, ExpressionId, int64_t>, std::string> sumsSeen_;
};

}  // namespace smddp::plan
