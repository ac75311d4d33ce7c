// Chooses the stores with which a rank writes staging memory that another rank of the node reads next: ordinary stores,
// which go through the caches, or streaming stores, which bypass them.
//
// Two cores may have separate last-level caches (chiplets, sockets). Then staging from one core to the other moves
// 1-2 GB/s with ordinary stores, and 5-8 GB/s with streaming stores. With a common cache, ordinary stores take half to
// two thirds of the time of streaming stores. This changes while a process runs: a hypervisor moves virtual cores, and
// the kernel moves threads that are not pinned, every few seconds. So every 64 pieces the writer measures one
// piece with the current stores, and the next one of the same kind and length with the other stores. It cannot measure
// the reader's time; the reader takes less or the same time with the stores that are faster for the writer.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "common/clock.h"

namespace smddp::transport::shm {

// The values of SMDDP_STAGING_STORES.
enum class StagingStores : uint8_t { Auto, Ordinary, Streaming };
StagingStores parseStagingStores(std::string_view text);

// Used by the thread that owns the engine.
class StoreChoice {
 public:
  // For shorter pieces the kind of stores does not matter.
  static constexpr int64_t kLongBytes = 16384;

  // The clock must outlive the object.
  explicit StoreChoice(StagingStores stores = StagingStores::Auto, const Clock& clock = monotonic())
      : stores_(stores), clock_(&clock) {}

  // True if pieces are written with streaming stores, apart from those that measure the other stores.
  bool streams() const { return streams_ || stores_ == StagingStores::Streaming; }

  // Calls write(streams), which writes a long piece with streaming or ordinary stores. `work` identifies the kind of
  // work, such as a step of a plan: only pieces with equal `work` and `bytes` are compared.
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
    const Nanoseconds begin = clock_->now();
    write(streams);
    return clock_->now() - begin;
  }
  // Takes the times of two equal pieces, and adjusts the choice.
  void compare(Nanoseconds ordinary, Nanoseconds streaming);

  StagingStores stores_;
  const Clock* clock_;
  int pieces_ = 0;              // pieces since the last comparison
  std::optional<Piece> first_;  // the first of two pieces that are compared
  Nanoseconds took_ = 0;        // the time that it took
  int votes_ = 0;  // for streaming stores; several votes, because a measurement may be interrupted
  bool streams_ = false;
};

}  // namespace smddp::transport::shm
