// How staging memory that another rank of the node reads next is written: with ordinary stores, through the caches, or
// with streaming ones, past them.
//
// Cores of one processor may have separate last-level caches (chiplets, sockets). Staging through memory that one core
// writes and another reads then moves 1-2 GB/s with ordinary stores, and 5-8 GB/s with streaming ones; where the cache is
// shared, ordinary stores take half to two thirds of the time. Which it is changes while a process runs: a hypervisor
// moves virtual cores, the kernel threads, every few seconds where nothing is pinned. So writers try the other way now
// and then, on one piece in 64, and compare it with one like it that they have just written. What the reader takes they do
// not know; it takes less or the same where the writer does.
//
// Used by the thread that owns the engine.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "common/clock.h"

namespace smddp::transport::shm {

// What SMDDP_STAGING_STORES says.
enum class StagingStores : uint8_t { Auto, Ordinary, Streaming };
StagingStores parseStagingStores(std::string_view text);
// The setting, parsed at the first call.
StagingStores stagingStores();

class StoreChoice {
 public:
  // Shorter pieces cost more by being started than by where they go.
  static constexpr int64_t kLongBytes = 16384;

  // The clock has to outlive the object.
  explicit StoreChoice(StagingStores stores = stagingStores(), const Clock& clock = monotonic())
      : stores_(stores), clock_(clock) {}

  // Whether pieces are written past the caches, those apart that try the other way.
  bool streams() const { return streams_ || stores_ == StagingStores::Streaming; }

  // Calls write(whether to stream), which writes a long piece. `work`: the same for pieces of which the same is made.
  template <typename Write>
  void write(const void* work, int64_t bytes, const Write& write) {
    if (stores_ != StagingStores::Auto || ++pieces_ < kPeriod) return write(streams());
    const Piece piece{work, bytes};
    if (!first_ || pieces_ == 2 * kPeriod) {
      pieces_ = kPeriod;
      took_ = timed(write, streams_);
      first_ = piece;
    } else if (*first_ == piece) {
      const Nanoseconds other = timed(write, !streams_);
      streams_ ? compare(other, took_) : compare(took_, other);
      first_.reset();
      pieces_ = 0;
    } else {
      write(streams_);
    }
  }

 private:
  static constexpr int kPeriod = 64;
  struct Piece {
    const void* work;
    int64_t bytes;
    bool operator==(const Piece&) const = default;
  };
  static const Clock& monotonic();

  template <typename Write>
  Nanoseconds timed(const Write& write, bool streams) const {
    const Nanoseconds begin = clock_.now();
    write(streams);
    return clock_.now() - begin;
  }
  // What two pieces alike took.
  void compare(Nanoseconds ordinary, Nanoseconds streaming);

  StagingStores stores_;
  const Clock& clock_;
  int pieces_ = 0;              // since the last comparison
  std::optional<Piece> first_;  // of the two that are to be compared
  Nanoseconds took_ = 0;        // the first one
  int votes_ = 0;               // one that was interrupted is outvoted by the others
  bool streams_ = false;
};

}  // namespace smddp::transport::shm
