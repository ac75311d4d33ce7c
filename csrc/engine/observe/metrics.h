// Counts the calls of a process while SMDDP_METRICS is set: how many there were, how long they took, and how long this
// rank waited in them for others. MetricsWriter writes it to files.
//
// Counters are kept by group, collective, algorithm and size. They stay when a group ends, because readers take
// differences between two looks.
//
// Threads: the one that owns the engine counts, without locks; totals() on any thread. A new algorithm, an error and a
// new group take a lock, which totals() holds for some microseconds. Ends with the engine. Errors: none.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/types.h"

namespace smddp::engine::observe {

// One thread at a time adds to it, and any thread reads it. So adding needs no locked instruction.
class Tally {
 public:
  void add(uint64_t number) {
    value_.store(value_.load(std::memory_order_relaxed) + number, std::memory_order_relaxed);
  }
  void add(Nanoseconds time) { add(static_cast<uint64_t>(time)); }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// A histogram of durations. Its intervals begin with 1 us and double, up to 67 s; the last one has all that were
// longer.
namespace durations {
inline constexpr size_t kLimits = 27;
inline constexpr size_t kBuckets = kLimits + 1;
constexpr Nanoseconds limit(size_t bucket) { return Nanoseconds{1000} << bucket; }
constexpr size_t bucketOf(Nanoseconds duration) {
  if (duration <= limit(0)) return 0;
  const auto doublings = std::bit_width(static_cast<uint64_t>(duration - 1) / 1000);
  return static_cast<size_t>(doublings) < kBuckets ? static_cast<size_t>(doublings) : kBuckets - 1;
}
}  // namespace durations

// The sizes by which calls are counted: those of at most 1 KiB, 32 KiB, 1 MiB, 32 MiB and 1 GiB, and larger ones.
namespace sizes {
inline constexpr std::array<const char*, 6> kNames = {"<=1KiB",  "<=32KiB", "<=1MiB",
                                                      "<=32MiB", "<=1GiB",  ">1GiB"};
constexpr size_t classOf(int64_t bytes) {
  if (bytes <= 1024) return 0;
  const auto doublings = std::bit_width(static_cast<uint64_t>(bytes - 1) >> 10);
  const auto found = (static_cast<size_t>(doublings) + 4) / 5;
  return found < kNames.size() ? found : kNames.size() - 1;
}
}  // namespace sizes

// The time that an execution waited for others while it had nothing else to do.
struct Waited {
  Nanoseconds node = 0;     // at the arrival, for the last rank of this node
  Nanoseconds network = 0;  // after it, for the first data of another node
};

class Metrics {
 public:
  // The calls of one group, collective, algorithm and size.
  class Calls {
   public:
    // A call that took so long, of so many bytes.
    void count(Nanoseconds duration, int64_t bytes) {
      byDuration_[durations::bucketOf(duration)].add(uint64_t{1});
      duration_.add(duration);
      bytes_.add(static_cast<uint64_t>(bytes));
    }
    // Counts the bytes that an execution of one or several calls has sent to other nodes, and how long it has waited.
    void countExecution(int64_t wireBytes, const Waited& waited) {
      if (wireBytes > 0) wireBytes_.add(static_cast<uint64_t>(wireBytes));
      if (waited.node > 0) waitedForNode_.add(waited.node);
      if (waited.network > 0) waitedForNetwork_.add(waited.network);
    }

   private:
    friend class Metrics;
    std::array<Tally, durations::kBuckets> byDuration_;
    Tally duration_, bytes_, wireBytes_, waitedForNode_, waitedForNetwork_;
  };

  class Algorithm {
   public:
    Algorithm(std::string collective, std::string name)
        : collective_(std::move(collective)), name_(std::move(name)) {}
    Calls& of(int64_t bytes) { return bySize_[sizes::classOf(bytes)]; }

   private:
    friend class Metrics;
    const std::string collective_, name_;
    std::array<Calls, sizes::kNames.size()> bySize_;
  };

  class Group {
   public:
    explicit Group(std::string name) : name_(std::move(name)) {}
    // The counters of an algorithm; they live as long as the group's.
    Algorithm& algorithm(const std::string& collective, const std::string& name);
    // A call that has ended with an error.
    void countError(const std::string& collective, const std::string& kind);
    // A call that has waited for so long that the log has it (Sentinel).
    void countStall() { stalls_.add(uint64_t{1}); }

   private:
    friend class Metrics;
    const std::string name_;
    Tally stalls_;
    mutable Mutex mutex_;
    std::vector<std::unique_ptr<Algorithm>> algorithms_ SMDDP_GUARDED_BY(mutex_);
    std::map<std::pair<std::string, std::string>, uint64_t> errors_ SMDDP_GUARDED_BY(mutex_);
  };

  // The counters of the group of this name. A program may make groups for ever: those beyond the first kMaxGroups share
  // counters, under the name "(other groups)".
  static constexpr size_t kMaxGroups = 64;
  std::shared_ptr<Group> group(const std::string& name);

  // All counts so far, in an order that does not change. Calls that never happened are left out.
  struct CallTotals {
    std::string group, collective, algorithm, size;
    std::array<uint64_t, durations::kBuckets> byDuration{};
    uint64_t calls = 0;
    Nanoseconds duration = 0;
    uint64_t bytes = 0, wireBytes = 0;
    Waited waited;
  };
  struct ErrorTotals {
    std::string group, collective, kind;
    uint64_t count = 0;
  };
  struct StallTotals {
    std::string group;
    uint64_t count = 0;
  };
  struct Totals {
    std::vector<CallTotals> calls;
    std::vector<ErrorTotals> errors;
    std::vector<StallTotals> stalls;  // of every group
  };
  Totals totals() const;

 private:
  static CallTotals totalsOf(const Group& group, const Algorithm& algorithm, size_t size);

  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<Group>> groups_ SMDDP_GUARDED_BY(mutex_);
};

}  // namespace smddp::engine::observe
