// The vocabulary of plans. A plan describes, as data, what one rank does during a collective.
//
// A plan has *lanes*, a lane has *blocks*, and a block is a loop of `trips` iterations over a few *steps*. Lanes
// advance concurrently; the steps of one lane run in order. Every number in a step is affine in the trip index k:
// base + perTrip * k. A plan's size therefore does not depend on the size of the message. For example, to copy
// 1 MiB in chunks of 64 KiB takes one step with 16 trips; its offset is 0 + 65536 * k. Memory is named
// symbolically (Ref) and bound to addresses when the plan runs, so a plan is built once per shape, cached, and run
// many times.
//
// Steps are ordered in three ways. Each has types of its own, so that they cannot be confused:
//
//   team counters   Signal / Wait        A counter is a monotonic word in shared memory. Its rank writes it, the
//                                        ranks of the node read it. Values are relative to the execution.
//   channels        Put / Post /         A channel is a one-way sequence of messages to a rank of another node. A
//                   Receive / Release /  put takes the next slot of the receiver's window. Receive waits until message
//                   Flush                i has arrived. Release gives its slot back to the sender (credit). Flush
//                                        waits until the sources of the first i puts may be overwritten.
//   lane order      –                    The steps of a lane run in order; the preamble runs before all lanes.
//
// A wait for a value of 0 or less returns at once. So a plan can say "wait until the last user of this slot is
// done" also for the first use. A rank may wait for its own counter; that orders two of its lanes.
//
// Every plan begins with the preamble [copies…] Signal(kArrival) Wait(team, kArrival). With the arrival signal a
// rank publishes what it was asked to do. After the wait all ranks of the node have read the same descriptors and
// take the same branch: error, staged or zero-copy, how many requests are fused.
//
// Posted receives: Post allows the transport to write the payload of a message to where the plan copies it, instead of
// into its slot. The copy then finds its source at its destination, and there is nothing to move. Not every transport
// can, and none does for a message that is already here. So a plan must be right in both cases, and the checker runs it
// in both.
//
// Staging memory: in each execution a rank owns one of the two halves of its staging memory; halves alternate. No
// plan ends before all ranks of the node have arrived, so a half is free again two executions later, whatever plans
// ran in between. Within an execution the plan itself orders the uses of a slot, and the checker proves that it
// does (plan/checker.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/encoding.h"
#include "common/types.h"

namespace smddp::plan {

// base + perTrip * k, where k is the trip index of the block that the step belongs to.
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
  Slot,        // slot `index` of a staging pool of a rank on my node; only its owner writes it
  Message,     // message `index` of the channel from `owner` with a stream
  Residual,  // mine; as long as my input, and kept from one execution to the next (Step::hasResidual)
};

// A range of bytes; the step has its length. owner: a local index for Mate* and Slot, a group rank for Message,
// unused for the others.
//
// An encoded range holds the elements in the plan's wire format. It is written and read as a whole: only its writer
// knows where an element lies in it.
struct Ref {
  Space space = Space::Input;
  uint8_t poolOrStream = 0;  // Slot: index in Plan::pools; Message: the stream
  bool isEncoded = false;
  Rank owner = 0;
  // Slot: i is slot i % n of a pool of n slots. Message: counts from 0, so i is the message i + 1 of Step::value.
  Affine index;
  Affine offset;  // bytes from the start of that memory
  friend bool operator==(const Ref&, const Ref&) = default;
};

enum class Op : uint8_t {
  Copy,  // every destination = the one source. If one destination is encoded, the others get what it decodes to;
         // so do those of Reduce
  Reduce,  // every destination = source 0 (op) source 1 (op) … in this order
  Signal,  // my counter := value
  Wait,  // wait until the counter of `who` (a local index, or kMates: all other ranks of my node) >= value
  Put,  // send `length` bytes of the one source as message `value`, counted from 1, of channel (who, stream)
  Post,  // message `value` of channel (who, stream), of `length` bytes, may arrive in the one destination
  Receive,  // wait until message `value`, counted from 1, of channel (who, stream) has arrived; it has `length` bytes
  Release,  // give the slots of the first `value` messages of channel (who, stream) back to the sender
  Flush,  // wait until the sources of the first `value` puts on channel (who, stream) may be overwritten
};

inline constexpr Rank kMates = -1;
// Counter 0 is the arrival signal of every plan. A plan may use the other counters as it likes.
inline constexpr int kArrival = 0;
inline constexpr int kNumCounters = 8;
// Streams tell apart the channels between the same two ranks.
inline constexpr int kNumStreams = 4;

struct Step {  // one action of a lane; the comments say which kinds of step use a field
  Op op = Op::Copy;
  bool preScale = false;   // Reduce, Copy: the sources are raw inputs (PREMUL_SUM multiplies them)
  bool postScale = false;  // Reduce, Copy: the result is final (AVG divides it)
  // Reduce, Copy with an encoded destination: error feedback. The result is increased by the residual before it is
  // encoded; then the residual becomes what this encoding has lost.
  bool hasResidual = false;
  uint8_t counter = 0;  // Signal, Wait
  uint8_t stream = 0;   // Put, Post, Receive, Release, Flush
  uint16_t numDestinations = 0;
  uint16_t numSources = 0;
  uint32_t firstRef = 0;  // Plan::refs[firstRef …]: destinations, then sources, then the residual
  Rank who = kMates;      // Wait: local index or kMates; channel steps: group rank
  // Bytes: Copy, Reduce, Put, Post, Receive. Copy, Reduce: before encoding. Otherwise: as the message has them.
  int64_t length = 0;
  Affine value;  // all but Copy and Reduce
  uint32_t numRefs() const { return uint32_t{numDestinations} + numSources + hasResidual; }
  friend bool operator==(const Step&, const Step&) = default;
};

struct Block {  // the steps from firstStep on, as a loop of `trips` iterations
  uint32_t firstStep = 0;
  uint32_t numSteps = 0;
  int64_t trips = 1;
};

struct Lane {        // blocks that run in order, concurrently with the other lanes
  std::string name;  // the name of the stage in errors and prints
  std::vector<Block> blocks;
};

// Equal slots in the staging half of the execution, from byte `offset` of the half on.
struct Pool {
  std::string name;
  int64_t slots = 0;
  int64_t slotBytes = 0;
  int64_t offset = 0;
};

// How many messages one execution sends and receives on a channel. Both ends declare it, also for empty messages.
struct ChannelUse {
  Rank peer = 0;
  uint8_t stream = 0;
  int64_t puts = 0;
  int64_t receives = 0;
};

struct Plan {  // everything that one rank does in one execution
  std::string name;
  Block preamble;
  std::vector<Step> steps;
  std::vector<Ref> refs;
  std::vector<Lane> lanes;
  std::vector<Pool> pools;
  int64_t stagingBytes = 0;  // the bytes of all pools in one half
  std::vector<ChannelUse> channels;
  bool zeroCopy = false;   // reads or writes the buffers of other ranks of the node
  Wire wire = Wire::fp32;  // of encoded ranges

  // The bytes of a range that a step reads or writes.
  int64_t bytesOf(const Step& s, const Ref& ref) const {
    const bool moves = s.op == Op::Copy || s.op == Op::Reduce;
    return moves && ref.isEncoded ? encodedLength(s.length) : s.length;
  }
  // The bytes that `length` bytes of float32 have when they are encoded.
  int64_t encodedLength(int64_t length) const {
    return static_cast<int64_t>(encodedBytes(wire, static_cast<size_t>(length) / sizeof(float)));
  }
  const Ref& destination(const Step& s, int i) const { return refs[s.firstRef + i]; }
  const Ref& source(const Step& s, int i) const { return refs[s.firstRef + s.numDestinations + i]; }
  const Ref& residual(const Step& s) const { return refs[s.firstRef + s.numRefs() - 1]; }
};

// Sizes that bound a plan. They are equal on all ranks of a group.
struct Limits {
  int64_t chunkBytes = 256 << 10;  // how much of the vector is staged at a time inside a node
  int64_t fabricChunkBytes =
      1 << 20;                       // how much of the vector is exchanged at a time between nodes
  int64_t messageBytes = 256 << 10;  // the longest put
  int64_t window = 4;                // messages that a channel can hold before one is released
  int64_t halfBytes = 8 << 20;       // the size of a staging half
};

}  // namespace smddp::plan
