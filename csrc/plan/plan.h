// The vocabulary of plans: what one rank does during a collective, as data.
//
// A plan has *lanes*; a lane has *blocks*; a block is a few *steps* done `trips` times. Lanes advance
// concurrently, each in order. Every number in a step is affine in the trip index k (base + perTrip * k), so a
// plan's size does not depend on the message's. Memory is named symbolically (Ref) and bound when the plan
// runs; a plan is therefore built once per shape, cached and run again and again.
//
// Three kinds of ordering exist and none can be confused with another, because each is a type of its own:
//
//   team counters   Signal / Wait        monotonic words in shared memory, one writer (their rank), read by
//                                        the ranks of its node. Values are relative to the execution.
//   channels        Put / Receive /      one-way streams of messages to a rank of another node. A put takes the
//                   Release / Flush      next slot of the receiver's window; Receive says that message i is
//                                        there, Release gives its slot back (credit), Flush says that the
//                                        sources of the first i puts may be overwritten.
//   lane order      –                    the steps of a lane; the preamble precedes all lanes.
//
// To wait for a value of 0 or less is to wait for nothing: "the slot's last user is done" before there was one.
// A rank may wait for its own counter; that orders two of its lanes.
//
// Every plan begins with the preamble [copies…] Signal(kArrival) Wait(team, kArrival). With the arrival signal a
// rank publishes what it was asked to do; after the wait all ranks of the node have read the same
// descriptions and take the same branch (error, staged or zero-copy, how many requests are fused).
//
// Staging memory: a rank owns, per execution, one half of a pool in shared memory (halves alternate). Because
// no plan ends before it has seen the arrival of its whole team, a half is free again two executions
// later, whatever plans ran in between. Inside an execution reuse of a slot is the plan's own business and
// the checker's (plan/checker.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/types.h"

namespace smddp::plan {

// base + perTrip * k, k the trip index of the block a step belongs to.
struct Affine {
  int64_t base = 0;
  int64_t perTrip = 0;
  constexpr int64_t at(int64_t k) const { return base + perTrip * k; }
  friend bool operator==(const Affine&, const Affine&) = default;
};

enum class Space : uint8_t {
  Input,       // my input
  Output,      // my output
  MateInput,   // the input of a rank on my node (zero-copy plans only)
  MateOutput,  // the output of a rank on my node (zero-copy plans only)
  Slot,        // slot `index` of staging pool `pool` of a rank on my node; only its owner writes it
  Arrival,     // message `index` of the channel from `owner`, stream `pool`
};

// Some bytes. owner: a local index for Mate* and Slot, a group rank for Arrival, unused for mine.
struct Ref {
  Space space = Space::Input;
  uint8_t pool = 0;
  Rank owner = 0;
  Affine index;   // slot or message number; slots repeat modulo their number
  Affine offset;  // bytes into it
  friend bool operator==(const Ref&, const Ref&) = default;
};

enum class Op : uint8_t {
  Copy,    // every destination = the one source
  Reduce,  // every destination = source 0 (op) source 1 (op) … in this order
  Signal,  // my counter := value
  Wait,  // until the counter of `who` (a local index, or kTeam: everyone else on my node) >= value
  Put,   // send `length` bytes of the one source as message value-1 of channel (who, stream)
  Receive,  // until message value-1 of channel (who, stream) is here; it has `length` bytes
  Release,  // the first `value` messages of channel (who, stream) are consumed
  Flush,  // until the sources of the first `value` puts on channel (who, stream) may be overwritten
};

inline constexpr Rank kTeam = -1;
// Counter 0 is the arrival signal of every plan; a plan may use those above it.
inline constexpr int kArrival = 0;
inline constexpr int kNumCounters = 8;
// Streams tell apart the channels between the same two ranks.
inline constexpr int kNumStreams = 4;

struct Step {
  Op op = Op::Copy;
  bool preScale = false;   // Reduce, Copy: the sources are raw inputs (PREMUL_SUM multiplies them)
  bool postScale = false;  // Reduce, Copy: this is the final value (AVG divides it)
  uint8_t counter = 0;     // Signal, Wait
  uint8_t stream = 0;      // Put, Receive, Release, Flush
  uint8_t numDestinations = 0;
  uint16_t numSources = 0;
  uint32_t firstRef = 0;  // Plan::refs[firstRef …]: destinations, then sources
  Rank who = kTeam;       // Wait: local index or kTeam; channel steps: group rank
  int64_t length = 0;     // bytes: Copy, Reduce, Put, Receive
  Affine value;           // Signal, Wait, Put, Receive, Release, Flush
  friend bool operator==(const Step&, const Step&) = default;
};

struct Block {
  uint32_t firstStep = 0;
  uint32_t numSteps = 0;
  int64_t trips = 1;
};

struct Lane {
  std::string name;  // the stage, as errors and prints call it
  std::vector<Block> blocks;
};

// Slots in the half that the execution owns, at `offset` bytes into it.
struct Pool {
  std::string name;
  int64_t slots = 0;
  int64_t slotBytes = 0;
  int64_t offset = 0;
};

// How far one execution moves a channel; both ends declare it, whether or not there were bytes to send.
struct ChannelUse {
  Rank peer = 0;
  uint8_t stream = 0;
  int64_t puts = 0;
  int64_t arrivals = 0;
};

struct Plan {
  std::string name;
  Block preamble;
  std::vector<Step> steps;
  std::vector<Ref> refs;
  std::vector<Lane> lanes;
  std::vector<Pool> pools;
  int64_t poolBytes = 0;  // what all pools need in one half
  std::vector<ChannelUse> channels;
  bool zeroCopy = false;  // reads or writes the buffers of other ranks of the node

  const Ref& destination(const Step& s, int i) const { return refs[s.firstRef + i]; }
  const Ref& source(const Step& s, int i) const { return refs[s.firstRef + s.numDestinations + i]; }
};

// What an algorithm may count on; equal on all ranks of a group.
struct Limits {
  int64_t chunkBytes = 256 << 10;      // vector staged at a time inside a node
  int64_t fabricChunkBytes = 1 << 20;  // vector under way between nodes at a time
  int64_t messageBytes = 256 << 10;    // longest put
  int64_t window = 4;                  // messages of a channel before the first is consumed
  int64_t poolBytes = 8 << 20;         // staging half
};

}  // namespace smddp::plan
