// The region of its slab that a rank shares with the ranks of its node for one group. Written by its owner only, read
// by its mates. The layout is the same in every process of one build.
//
//   RegionHeader | tracks x TrackHeader | tracks x 2 halves of staging memory (page aligned)
//
// A *track* is the set of resources (counters, staging memory, channels) that one execution uses (track.h).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "plan/plan.h"
#include "transport/shm/comm_memory.h"
#include "transport/wire.h"

namespace smddp::engine::memory {

inline constexpr size_t kCacheLine = 64;
inline constexpr size_t kPage = 4096;
// Requests that one execution may fuse.
inline constexpr int kMaxFused = 16;
// Staging memory beside an arrival: 96 = 2 cache lines − 32 bytes of fields before it.
inline constexpr size_t kNearBytes = 96;

// A team counter. It holds (execution << kValueBits) | value, where `execution` is Track::executionNumber and `value`
// counts from 0 in each execution. So a counter never goes back. Example: chunk 5 in execution 3 is 3·2^24 + 5; a rank
// already in execution 4 has at least 4·2^24, so every wait of execution 3 is satisfied.
struct alignas(kCacheLine) Counter {
  std::atomic<uint64_t> value{0};
};
inline constexpr int kValueBits = 24;
constexpr uint64_t counterValue(uint64_t execution, int64_t value) {
  return execution << kValueBits | static_cast<uint64_t>(value);
}

// The places in communication memory of the buffers of a rank for one execution.
struct BufferLocations {
  transport::shm::Location input;
  transport::shm::Location output;
};

// The record that a rank publishes when it arrives at an execution: all that the ranks of a node must agree on.
// `number` is stored last, with release order: a mate that has seen it sees all other fields. Executions use the two
// records in turn: a record is written again only after everyone has arrived at the execution in between, hence has
// read it.
struct alignas(2 * kCacheLine) Arrival {
  std::atomic<uint64_t> number{0};  // Track::executionNumber: counts the executions of this track
  transport::CallFingerprint fingerprint;
  uint32_t ready = 1;  // requests this rank could fuse, the first included
  // 1: `buffers` is valid. 0: the buffers are private, or the choice of the plan does not depend on where they lie.
  uint16_t shared = 0;
  uint16_t isNear = 0;  // 1: its slots are in `near`, not in the half
  // The bytes of a small vector arrive in the line that a mate looks at anyway, and in the next, which processors fetch
  // with it.
  std::array<std::byte, kNearBytes> near{};
  // Cumulative bytes of the ready requests.
  alignas(kCacheLine) std::array<uint32_t, kMaxFused> ends{};
  alignas(kCacheLine) BufferLocations buffers;
};

struct TrackHeader {
  std::array<Counter, plan::kNumCounters> counters;
  std::array<Arrival, 2> arrivals;
};
static_assert(offsetof(Arrival, ends) == 2 * kCacheLine);

// A Break in shared memory (break.h). No field is a bool: a mate may write any byte, and not every byte is one.
struct BreakRecord {
  uint64_t firstBroken = 0;
  uint32_t kind = 0;
  int32_t lost = 0;
  int32_t noticedBy = 0;
  uint8_t isHostSilent = 0;
  char text[1000] = {};
};
// A rank can publish several breaks, each from an earlier operation than the last; more than kMaxBreaks are dropped.
inline constexpr uint32_t kMaxBreaks = 4;

// Zeroed memory is a valid header. It is never constructed, because mates that have not noticed yet that the region was
// given up may look at it at any time (RegionPool).
struct alignas(kCacheLine) RegionHeader {
  // The group that owns this region (GroupEntry::groupId). It has another value once the owner has given the region up.
  std::atomic<uint64_t> group{0};
  std::atomic<uint32_t> numBreaks{0};  // stored after the record
  std::atomic<uint32_t> left{0};       // this rank has destroyed the group
  // The number of the last collective that this rank has called, and whom it blames while it waits (blame.h).
  alignas(kCacheLine) std::atomic<uint64_t> called{0};
  std::atomic<uint64_t> blame{0};
  // That another group of this rank has failed (blame.h): the number of calls that it had made here, plus 1. Stored
  // after the text, once.
  std::atomic<uint64_t> trouble{0};
  char troubleText[400] = {};
  alignas(kCacheLine) std::array<BreakRecord, kMaxBreaks> breaks;
};

// Offsets in a region. With 2 tracks the halves (track, half) lie in the order (0, 0), (0, 1), (1, 0), (1, 1);
// halfOffset(2, 0) is their end.
struct RegionLayout {
  int64_t tracks = 1;
  int64_t halfBytes = 0;

  static constexpr size_t roundUp(size_t n, size_t to) { return (n + to - 1) / to * to; }
  size_t trackOffset(int64_t track) const {
    return roundUp(sizeof(RegionHeader), alignof(TrackHeader)) +
           static_cast<size_t>(track) * sizeof(TrackHeader);
  }
  size_t halfOffset(int64_t track, int half) const {
    return roundUp(trackOffset(tracks), kPage) +
           static_cast<size_t>(track * 2 + half) * roundUp(static_cast<size_t>(halfBytes), kPage);
  }
  size_t bytes() const { return halfOffset(tracks, 0); }
};

}  // namespace smddp::engine::memory
