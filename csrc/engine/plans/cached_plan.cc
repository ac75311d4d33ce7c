#include "engine/plans/cached_plan.h"

#include <algorithm>
#include <utility>

#include "common/error.h"
#include "engine/memory/region.h"

namespace smddp::engine::plans {

using plan::Op;
using plan::Ref;
using plan::Space;
using plan::Step;

namespace {

// A larger value would run into the number of the execution (Counter), and waits would end too early.
void requireCountable(const Step& step, int64_t trips) {
  if (step.op != Op::Signal && step.op != Op::Wait) return;
  const int64_t most = std::max(step.value.at(0), step.value.at(trips - 1));
  if (most < int64_t{1} << memory::kValueBits) return;
  raise(ErrorKind::Usage,
        "this call has {} chunks, but ranks of a node can count 2^{} at most; raise "
        "SMDDP_CHUNK_BYTES and SMDDP_FABRIC_CHUNK_BYTES",
        most, memory::kValueBits);
}

}  // namespace

CachedPlan::CachedPlan(plan::Plan made)
    : plan(std::move(made)),
      channelOfStep(plan.steps.size(), kNone),
      channelOfRef(plan.refs.size(), kNone),
      longestMessage(plan.channels.size(), 0) {
  const auto find = [&](Rank rank, uint8_t stream) {
    for (size_t i = 0; i < plan.channels.size(); ++i) {
      if (plan.channels[i].peer == rank && plan.channels[i].stream == stream) {
        return static_cast<uint16_t>(i);
      }
    }
    return kNone;
  };
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    if (step.op == Op::Put || step.op == Op::Post || step.op == Op::Receive ||
        step.op == Op::Release || step.op == Op::Flush) {
      channelOfStep[i] = find(step.who, step.stream);
      if (channelOfStep[i] != kNone && (step.op == Op::Put || step.op == Op::Receive)) {
        auto& longest = longestMessage[channelOfStep[i]];
        longest = std::max(longest, step.length);
      }
    }
  }
  for (size_t i = 0; i < plan.refs.size(); ++i) {
    const Ref& ref = plan.refs[i];
    if (ref.space == Space::Message) channelOfRef[i] = find(ref.owner, ref.poolOrStream);
  }
  // Returns the end, in the half, of the slots that a step uses. Example: a pool of 2 slots of 64 bytes at 0, and a
  // step with offset 0 and length 8: 0 + 1 · 64 + 0 + 8 = 72. An affine offset is greatest in the first or the last
  // trip.
  const auto slotsEnd = [&](const Step& step, int64_t trips) {
    int64_t end = 0;
    for (uint32_t i = 0; i < step.numDestinations + uint32_t{step.numSources}; ++i) {
      const Ref& ref = plan.refs[step.firstRef + i];
      if (ref.space != Space::Slot) continue;
      const plan::Pool& pool = plan.pools[ref.poolOrStream];
      end = std::max(end, pool.offset + (pool.slots - 1) * pool.slotBytes +
                              std::max(ref.offset.at(0), ref.offset.at(trips - 1)) +
                              plan.bytesOf(step, ref));
    }
    return end;
  };
  const auto add = [&](const plan::Block& block) {
    for (uint32_t i = block.firstStep; i < block.firstStep + block.numSteps; ++i) {
      const Step& step = plan.steps[i];
      requireCountable(step, block.trips);
      if (step.op == Op::Put) {
        putBytes += step.length * block.trips;
        putsStaging |= step.length > 0 && plan.source(step, 0).space == Space::Slot;
      }
      if (step.op == Op::Receive) receiveBytes += step.length * block.trips;
      if (step.op == Op::Copy || step.op == Op::Reduce) {
        memoryBytes += step.length * step.numSources * block.trips;
        fitsNear &= slotsEnd(step, block.trips) <= static_cast<int64_t>(memory::kNearBytes);
      }
    }
  };
  add(plan.preamble);
  for (const plan::Lane& lane : plan.lanes) {
    for (const plan::Block& block : lane.blocks) add(block);
  }
}

size_t CachedPlan::heapBytes() const {
  constexpr size_t kOverhead = 16;  // bytes that each allocation takes beside its contents
  const auto of = [](const auto& values) {
    return values.capacity() == 0 ? 0 : kOverhead + values.capacity() * sizeof(*values.data());
  };
  size_t bytes = of(plan.name) + of(plan.steps) + of(plan.refs) + of(plan.lanes) + of(plan.pools) +
                 of(plan.channels) + of(channelOfStep) + of(channelOfRef) + of(longestMessage);
  for (const plan::Lane& lane : plan.lanes) bytes += of(lane.name) + of(lane.blocks);
  for (const plan::Pool& pool : plan.pools) bytes += of(pool.name);
  return bytes;
}

}  // namespace smddp::engine::plans
