// Runs a plan: binds its symbols to addresses and advances its lanes, without ever blocking.
//
// Owns the binding, the positions in the plan and scratch memory; the track, the plan and the buffers outlive it. Runs
// on the thread that owns the engine. An exception (mismatch, broken channel) leaves it where it was; the group then
// fails the operation and does not run it again.
#pragma once

#include <deque>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "common/ownership.h"
#include "common/types.h"
#include "engine/calls/buffer.h"
#include "engine/plans/cached_plan.h"
#include "engine/team/membership.h"
#include "engine/team/team_bell.h"
#include "engine/team/track.h"
#include "plan/plan.h"
#include "reduction/encoded.h"
#include "reduction/reduce.h"
#include "transport/wire.h"

namespace smddp::engine::plans {

// The buffers and the call for which one execution runs a plan.
struct Binding {
  calls::Buffer input;
  calls::Buffer output;
  std::vector<std::byte*> mateInputs;  // by local index; empty except for zero-copy plans
  std::vector<std::byte*> mateOutputs;
  float* residual = nullptr;  // used by plans with error feedback
  DataType type = DataType::uint8;
  ReduceOp op = ReduceOp::SUM;
  reduction::Scale scale;  // factor and divisor
  transport::CallFingerprint fingerprint;
};

// Why nothing advances: the step at which the first blocked lane stands, and whom any lane awaits.
struct BlockedStep {
  std::string where;
  std::set<Rank> awaited;
  int64_t exchanged = 0, toExchange = 0;  // bytes exchanged with other nodes so far, and in all
};

class Executor {
 public:
  Executor(const Ownership& ownership, const team::Membership& membership, team::Track& track,
           team::TeamBell& bell)
      : ownership_(ownership), membership_(membership), track_(track), bell_(bell) {}

  // The binding of the next execution, which the caller fills in before start(). It is one object for all executions.
  Binding& binding() { return binding_; }
  // Begins an execution at its preamble, or after it if all ranks have `arrived`. The track's execution number and
  // channels must be those of this execution.
  void start(const CachedPlan& cached, bool arrived);
  // The two moves of a plan with collectives::Preamble::OneShot, for a caller that does the rest itself: copyIn()
  // before this rank arrives, sum() when all ranks have arrived.
  void copyIn(const CachedPlan& cached);
  void sum();
  // Ends an execution that cannot be completed. From then on nothing is written to the buffers.
  void abandon();
  // Does what can be done now. True when anything advanced.
  bool advance();
  bool preambleDone() const { return preambleNext_ == cached_->plan.preamble.numSteps; }
  bool done() const { return done_; }
  // True if data of another node has come.
  bool hasReceived() const { return hasReceived_; }
  BlockedStep blockedStep() const;

 private:
  // The position of a lane: at a step of a block, in one of the block's iterations.
  struct Position {
    uint32_t block = 0;
    uint32_t step = 0;
    int64_t trip = 0;
  };
  struct BoundChannel {
    team::ChannelEnds* ends;
    // Messages of earlier executions on the channel: the first put of this one is message putsBefore + 1.
    uint64_t putsBefore;
    uint64_t receivesBefore;
  };

  // A copy of a message whose source is not one run of bytes.
  struct Gathered {
    const transport::SendChannel* channel = nullptr;
    uint64_t number = 0;  // the number of the message on the channel
    std::vector<std::byte> bytes{};
  };

  bool advanceLane(size_t lane);
  bool execute(uint32_t stepIndex, int64_t trip);
  // The computation of a copy or reduction.
  struct Arithmetic {
    ReduceOp op;
    reduction::Scale scale;
  };
  Arithmetic arithmeticOf(const plan::Step& step) const;
  void move(const plan::Step& step, int64_t trip);
  void moveEncoded(const plan::Step& step, int64_t trip);
  // A copy that nothing reads any more, or a new one.
  Gathered& freeCopy();
  void gather(uint32_t refIndex, int64_t trip, int64_t skip, std::span<std::byte> to) const;
  bool hasEncoded(const plan::Step& step) const;
  bool isStaging(const plan::Step& step, uint32_t destination) const;
  void writeStreaming(const plan::Step& step, int64_t bytes, bool copies,
                      const Arithmetic& arithmetic);
  calls::Buffer::Run resolve(uint32_t refIndex, int64_t trip, int64_t skip, int64_t length) const;
  bool counterReached(const plan::Step& step, int64_t value) const;
  transport::Payload payloadOf(const plan::Step& step, int64_t trip) const;
  bool put(const plan::Step& step, uint32_t stepIndex, int64_t trip);
  bool received(const plan::Step& step, uint32_t stepIndex, int64_t trip);
  // True if the network no longer reads the memory that this execution has put on one of its channels, or on all of
  // them.
  bool isFlushed(size_t channel) const;
  bool flushed() const;
  void addAwaited(const plan::Step& step, int64_t trip, std::set<Rank>& awaited) const;
  const BoundChannel& channelOf(uint32_t stepIndex) const {
    return channels_[cached_->channelOfStep[stepIndex]];
  }
  void bindChannels();

  const Ownership& ownership_;
  const team::Membership& membership_;
  const plan::Topology& topology_ = membership_.topology;
  team::Track& track_;
  team::TeamBell& bell_;
  const CachedPlan* cached_ = nullptr;
  Binding binding_;
  std::vector<BoundChannel> channels_;
  std::vector<Position> positions_;
  uint32_t preambleNext_ = 0;
  bool done_ = true;
  int64_t exchanged_ = 0;  // bytes, with other nodes
  bool hasReceived_ = false;
  // Has as many copies as the network reads at a time, and none when the execution has ended.
  std::deque<Gathered> gathered_;
  // Scratch of move(), kept to save allocations.
  std::vector<void*> destinations_;
  std::vector<const void*> sources_;
  // Holds one summed piece whose only destinations are staging memory.
  std::vector<std::byte> sums_;
  // moveEncoded() uses these: its operands, and pieces of vectors that do not lie in one run of bytes.
  std::vector<reduction::Source> encodedSources_;
  std::vector<reduction::Destination> encodedDestinations_;
  std::vector<std::byte> pieces_;
};

}  // namespace smddp::engine::plans
