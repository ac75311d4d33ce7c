// How far away the caches of a mate are, and so how what it is to read should be written.
//
// Cores of one processor may have separate last-level caches (chiplets, sockets). Staging through memory that one core
// writes and another reads then moves 1-2 GB/s with ordinary stores, and 5-8 GB/s with streaming ones; where the cache is
// shared, ordinary stores are up to half as fast again. Which it is changes while a process runs: a hypervisor moves
// virtual cores, the kernel threads, every few seconds where nothing is pinned. So it is measured all the time, as how
// long a load takes that brings in a line a mate has written. What was streamed is read from memory; so streaming is for
// lines that take clearly longer than that to come from a mate. On an EPYC they take 10-45 ns within a shared cache and
// 100-180 between two, while nothing else is going on; on a Xeon (Sapphire Rapids) 60-110 within its one cache, and
// 110-135 from memory. While bytes are moved the same loads take up to three times as long, some of them.
//
// Used by the thread that owns the engine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "common/clock.h"

namespace smddp::transport::shm {

// What SMDDP_STAGING_STORES says.
enum class StagingStores : uint8_t { Auto, Ordinary, Streaming };
// Throws Usage for anything but "auto", "ordinary" and "streaming".
StagingStores parseStagingStores(std::string_view text);
// The setting, parsed at the first call. Ordinary instead of Auto where the clock is too slow to tell.
StagingStores stagingStores();
// What two readings of the clock are apart with nothing in between.
Nanoseconds clockCost();
// How long a load takes of a line that no cache has; measured at the first call, in 30 us. Where the processor has no
// streaming stores, longer than any load.
Nanoseconds memoryLatency();

class Distance {
 public:
  // Shorter pieces cost more by being started than by where they go.
  static constexpr int64_t kLongBytes = 16384;

  explicit Distance(StagingStores stores = stagingStores(), Nanoseconds memory = memoryLatency())
      : stores_(stores), far_(memory * 5 / 4) {}

  // Whether long pieces should be written past the caches.
  bool streams() const { return streams_ || stores_ == StagingStores::Streaming; }

  // Calls `load`, which reads the one line behind `seen` that a mate writes, and learns from the time that took when the
  // value is another one than before. Returns the value.
  template <typename Load>
  uint64_t timed(uint64_t& seen, Load load) {
    if (stores_ != StagingStores::Auto) return load();
    const MonotonicClock clock;
    const Nanoseconds begin = clock.now();
    const uint64_t value = load();
    const Nanoseconds duration = clock.now() - begin;
    if (value != seen) saw(duration - clockCost());
    seen = value;
    return value;
  }

  // A load of a line that a mate had written took so long.
  void saw(Nanoseconds duration) {
    // While there is much traffic most loads may be slow for a while. A long call makes dozens of them.
    constexpr int kSure = 256;
    votes_ += duration > far_ ? 1 : -1;
    if (votes_ >= kSure) streams_ = true;
    if (votes_ <= 0) streams_ = false;
    votes_ = std::clamp(votes_, 0, kSure);
  }

 private:
  StagingStores stores_;
  Nanoseconds far_;
  int votes_ = 0;  // one that was interrupted is outvoted by the others
  bool streams_ = false;
};

}  // namespace smddp::transport::shm
