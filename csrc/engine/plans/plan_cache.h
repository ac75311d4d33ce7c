// Keeps one plan for each shape. A training step repeats the same few shapes, so each plan is built once.
//
// A program whose sizes never repeat would fill the memory with plans. So the cache holds a limited number of bytes,
// and drops the plans that were not used for the longest time. A plan that somebody holds (PlanCache::Held) stays.
//
// Used by the thread that owns the engine.
#pragma once

#include <algorithm>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "collectives/selection.h"
#include "collectives/tuning.h"
#include "common/config.h"
#include "common/log.h"
#include "engine/calls/request.h"
#include "engine/observe/metrics.h"
#include "engine/observe/recent_durations.h"
#include "engine/plans/cached_plan.h"

namespace smddp::engine::plans {

// Counts how often an algorithm ran on this rank, and how many bytes this rank moved. smddp.statistics() shows it.
struct AlgorithmUse {
  uint64_t calls = 0;
  uint64_t bytes = 0;        // the sum over the calls' vectors (Shape::bytes)
  uint64_t memoryBytes = 0;  // read by its copies and reductions
  uint64_t fabricBytes = 0;  // sent to other nodes
  uint64_t zeroCopy = 0;     // calls that staged nothing
};

// The way in which an execution begins, once the plan for private buffers has been found.
enum class Start : uint8_t {
  // If another plan would be used when all ranks have shared buffers, a rank with shared buffers arrives without
  // copying, and waits with its decision.
  DecideAfterArrival,
  RunPlan,  // every rank runs it, since it is used for shared buffers, too
  OneShot,  // as RunPlan; it is one copy, the arrival and one sum (Operations::runOneShot)
};

class PlanCache {
 public:
  // groupOverrides: the algorithms that the group asks for, as in SMDDP_ALGORITHM. If empty, Settings::algorithm
  // decides.
  // tuning: the rows of SMDDP_TUNING_FILE.
  // wire: how calls travel between nodes that may be encoded.
  // metrics: counts calls if it is not null.
  PlanCache(const plan::Topology& topology, const plan::Limits& limits, const Settings& settings,
            const std::string& groupOverrides = "",
            std::shared_ptr<const collectives::Tuning> tuning =
                std::make_shared<const collectives::Tuning>(),
            Wire wire = Wire::fp32, observe::Metrics::Group* metrics = nullptr)
      : topology_(topology),
        limits_(limits),
        overrides_(groupOverrides.empty() ? settings.algorithm : groupOverrides),
        isOfGroup_(!groupOverrides.empty()),
        tuning_(std::move(tuning)),
        oneShotBytes_(settings.oneShotBytes),
        limitBytes_(static_cast<size_t>(settings.planCacheBytes)),
        wire_(wire),
        metrics_(metrics) {}

  struct Entry {
    collectives::Shape shape;
    AlgorithmUse* use;                     // shared by all entries with this algorithm
    observe::Metrics::Algorithm* metrics;  // shared, too; null: calls are not counted
    CachedPlan cached;
    const collectives::Choice* choice;
    Start start = Start::DecideAfterArrival;
    size_t bytes = 0;                           // bytes that the cache keeps for the entry
    mutable observe::RecentDurations recent{};  // durations of its executions
    mutable uint32_t holders = 0;               // Held

    // Counts one execution of the plan: the operations in it, and the bytes of their vectors.
    void count(uint64_t calls, int64_t bytesOfCalls) const {
      use->calls += calls;
      use->bytes += static_cast<uint64_t>(bytesOfCalls);
      use->memoryBytes += static_cast<uint64_t>(cached.memoryBytes);
      use->fabricBytes += static_cast<uint64_t>(cached.putBytes);
      use->zeroCopy += cached.plan.zeroCopy ? calls : 0;
    }
  };

  // An entry that the cache may not drop meanwhile. Ends before the cache does.
  class Held {
   public:
    Held() = default;
    explicit Held(const Entry& entry) : entry_(&entry) { ++entry.holders; }
    Held(Held&& other) noexcept : entry_(std::exchange(other.entry_, nullptr)) {}
    Held& operator=(Held&& other) noexcept {
      std::swap(entry_, other.entry_);
      return *this;
    }
    ~Held() {
      if (entry_ != nullptr) --entry_->holders;
    }
    const Entry* operator->() const { return entry_; }

   private:
    const Entry* entry_ = nullptr;
  };

  Wire wire() const { return wire_; }
  void useWire(Wire wire) { wire_ = wire; }
  // The wire format for a call. Only sums of float32 can be encoded.
  Wire wireFor(const calls::Request& request, int64_t bytes) const {
    const bool isSum = request.op == ReduceOp::SUM || request.op == ReduceOp::AVG;
    const Wire wanted = isSum && request.type == DataType::float32 ? wire_ : Wire::fp32;
    return collectives::encodedAs(topology_, request.collective, bytes, wanted);
  }

  // The setting that forbids allreduces to travel in other formats, such as "SMDDP_ALGORITHM=allreduce=ring"; null:
  // nothing.
  std::optional<std::string> whyOnlyFp32() const {
    if (collectives::knowsFormats(collectives::Collective::AllReduce, overrides_, origin()))
      return {};
    return fmt::format("{}={}", origin(), overrides_);
  }

  // Valid until the next get(), or as long as it is held.
  const Entry& get(const collectives::Shape& shape) {
    if (!entries_.empty() && entries_.front().shape == shape) return entries_.front();
    const auto known = byShape_.find(shape);
    if (known != byShape_.end()) {
      entries_.splice(entries_.begin(), entries_, known->second);
    } else {
      entries_.push_front(build(shape));
      byShape_.emplace(shape, entries_.begin());
      bytes_ += entries_.front().bytes;
    }
    if (bytes_ > limitBytes_) dropOldest();
    return entries_.front();
  }

  // The algorithm of the plan that get() would return; null where it would throw.
  const collectives::Choice* choiceFor(const collectives::Shape& shape) const {
    return collectives::find(topology_, limits_, shape, oneShotBytes_, overrides_, origin(),
                             *tuning_);
  }

  // Bytes and number of all plans that the cache keeps.
  size_t bytes() const { return bytes_; }
  size_t size() const { return entries_.size(); }

  // By collective and algorithm ("allreduce/direct"), those that ran.
  std::map<std::string, AlgorithmUse> statistics() const {
    auto ran = uses_;
    std::erase_if(ran, [](const auto& named) { return named.second.calls == 0; });
    return ran;
  }

  // The sources that choose() asks, in its order: "SMDDP_ALGORITHM=allreduce=ring, then the built-in table".
  std::string sources() const {
    std::string text;
    if (!overrides_.empty()) {
      text =
          fmt::format("{}{}, then ", isOfGroup_ ? "the group's " : "SMDDP_ALGORITHM=", overrides_);
    }
    if (!tuning_->origin().empty()) {
      const auto isForUs = [&](const auto& row) {
        return collectives::isForLayout(row, topology_);
      };
      text += fmt::format("SMDDP_TUNING_FILE={} ({} row{}, {} for these nodes), then ",
                          tuning_->origin(), tuning_->rows().size(),
                          tuning_->rows().size() == 1 ? "" : "s",
                          std::count_if(tuning_->rows().begin(), tuning_->rows().end(), isForUs));
    }
    return text + "the built-in table";
  }

 private:
  const collectives::Choice& choose(const collectives::Shape& shape) const {
    return collectives::select(topology_, limits_, shape, oneShotBytes_, overrides_, origin(),
                               *tuning_);
  }
  // The place where the user wrote the overrides.
  const char* origin() const { return isOfGroup_ ? "algorithm" : "SMDDP_ALGORITHM"; }
  Entry build(const collectives::Shape& shape) {
    const collectives::Choice& choice = choose(shape);
    Entry entry{.shape = shape,
                .use = &uses_[fmt::format("{}/{}", toString(shape.collective), choice.name)],
                .metrics = metrics_ == nullptr
                               ? nullptr
                               : &metrics_->algorithm(toString(shape.collective), choice.name),
                .cached = CachedPlan(choice.build(topology_, limits_, shape)),
                .choice = &choice,
                .start = startOf(shape, choice)};
    entry.bytes = kOverheadBytes + entry.cached.heapBytes();
    SMDDP_LOG(Debug, "engine", "{} of {} bytes: {}", toString(shape.collective), shape.bytes,
              entry.cached.plan.name);
    return entry;
  }
  // Entries that are held were used a short time ago, so they are near the front. The first entry is that of the
  // current call, and stays.
  void dropOldest() {
    for (auto it = std::prev(entries_.end()); bytes_ > limitBytes_ && it != entries_.begin();) {
      const auto oldest = it--;
      if (oldest->holders > 0) continue;
      bytes_ -= oldest->bytes;
      byShape_.erase(oldest->shape);
      entries_.erase(oldest);
    }
  }
  Start startOf(collectives::Shape shape, const collectives::Choice& choice) const {
    if (shape.shared || shape.afterArrival) return Start::RunPlan;
    if (topology_.teamSize() == 1 || shape.collective == collectives::Collective::Barrier) {
      return Start::RunPlan;
    }
    shape.shared = true;
    if (choice.preamble == collectives::Preamble::NoCopy || &choose(shape) != &choice) {
      return Start::DecideAfterArrival;
    }
    const bool isOneShot = choice.preamble == collectives::Preamble::OneShot && shape.bytes > 0;
    return isOneShot ? Start::OneShot : Start::RunPlan;
  }

  struct Hash {
    size_t operator()(const collectives::Shape& shape) const {
      size_t hash = static_cast<size_t>(shape.bytes) * 0x9e3779b97f4a7c15;
      hash ^= static_cast<size_t>(shape.root) << 8 | static_cast<size_t>(shape.collective) << 1 |
              static_cast<size_t>(shape.shared);
      hash ^= static_cast<size_t>(shape.afterArrival) << 40 |
              static_cast<size_t>(shape.wire) << 41 | static_cast<size_t>(shape.feedback) << 43;
      return hash;
    }
  };

  // The bytes of an entry beside those that its plan has on the heap: nodes of the list and of the map, a bucket.
  static constexpr size_t kOverheadBytes = sizeof(Entry) + sizeof(collectives::Shape) + 64;

  const plan::Topology& topology_;
  const plan::Limits& limits_;
  const std::string overrides_;  // the algorithms that the user asks for
  const bool isOfGroup_;         // not those of SMDDP_ALGORITHM
  const std::shared_ptr<const collectives::Tuning> tuning_;
  const int64_t oneShotBytes_;
  const size_t limitBytes_;  // of all plans, except those that are held and the one asked for last
  Wire wire_;
  observe::Metrics::Group* const metrics_;
  std::list<Entry> entries_;  // the one asked for last is the first
  std::unordered_map<collectives::Shape, std::list<Entry>::iterator, Hash> byShape_;
  size_t bytes_ = 0;
  std::map<std::string, AlgorithmUse> uses_;  // Entry::use points into it
};

}  // namespace smddp::engine::plans
