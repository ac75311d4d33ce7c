// Shape -> plan. A training step repeats the same few shapes, so building a plan costs nothing in the end.
//
// Used by the thread that owns the engine. Plans live as long as the cache.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "collectives/selection.h"
#include "collectives/tuning.h"
#include "common/config.h"
#include "common/log.h"
#include "engine/executor.h"

namespace smddp::engine {

// How often an algorithm ran on this rank, and what this rank moved. The user reads of it in smddp.statistics().
struct AlgorithmUse {
  uint64_t calls = 0;
  uint64_t bytes = 0;        // of the calls' vectors (Shape::bytes)
  uint64_t memoryBytes = 0;  // read by its copies and reductions
  uint64_t fabricBytes = 0;  // sent to other nodes
  uint64_t zeroCopy = 0;     // calls that staged nothing
};

// How an execution begins, once the plan for private buffers has been found.
enum class Start : uint8_t {
  // If another plan would be used when all ranks have shared buffers, a rank with shared buffers arrives without
  // copying.
  AskMates,
  RunPlan,  // every rank runs it, since it is used for shared buffers, too
  OneShot,  // the same, and it is one copy, the arrival and one sum (Operations::runOneShot)
};

class PlanCache {
 public:
  // overrides: what the group asks for, as SMDDP_ALGORITHM does; that decides where it is empty.
  PlanCache(const plan::Topology& topology, const plan::Limits& limits, std::string overrides)
      : topology_(topology), limits_(limits), overrides_(std::move(overrides)) {}

  struct Entry {
    AlgorithmUse* use;  // of all entries with this algorithm
    CachedPlan cached;
    const collectives::Choice* choice;
    Start start = Start::AskMates;

    // Operations that this plan was used for, and the bytes of their vectors.
    void count(uint64_t calls, int64_t bytes) const {
      use->calls += calls;
      use->bytes += static_cast<uint64_t>(bytes);
      use->memoryBytes += static_cast<uint64_t>(cached.moveBytes);
      use->fabricBytes += static_cast<uint64_t>(cached.putBytes);
      use->zeroCopy += cached.plan.zeroCopy ? calls : 0;
    }
  };

  const Entry& get(const collectives::Shape& shape) {
    if (last_ != nullptr && lastShape_ == shape) return *last_;
    auto& slot = entries_[shape];
    if (!slot) {
      slot = std::make_unique<Entry>(build(shape));
      slot->start = startOf(shape, *slot->choice);
      SMDDP_LOG(Debug, "engine", "{} of {} bytes: {}", toString(shape.collective), shape.bytes,
                slot->cached.plan.name);
    }
    lastShape_ = shape;
    last_ = slot.get();
    return *slot;
  }

  // By collective and algorithm ("allreduce/direct"), those that ran.
  std::map<std::string, AlgorithmUse> statistics() const {
    auto ran = uses_;
    std::erase_if(ran, [](const auto& named) { return named.second.calls == 0; });
    return ran;
  }

  // What choose() asks, in its order: "SMDDP_ALGORITHM=allreduce=ring, then the built-in table".
  std::string sources() const {
    std::string text;
    if (!overrides_.empty()) {
      text = fmt::format("the group's {}, then ", overrides_);
    } else if (!settings().algorithm.empty()) {
      text = fmt::format("SMDDP_ALGORITHM={}, then ", settings().algorithm);
    }
    if (const auto& tuning = collectives::tuningFromSettings(); !tuning.origin().empty()) {
      const auto isForUs = [&](const auto& row) {
        return collectives::isForLayout(row, topology_);
      };
      text +=
          fmt::format("SMDDP_TUNING_FILE={} ({} row{}, {} for these nodes), then ", tuning.origin(),
                      tuning.rows().size(), tuning.rows().size() == 1 ? "" : "s",
                      std::count_if(tuning.rows().begin(), tuning.rows().end(), isForUs));
    }
    return text + "the built-in table";
  }

 private:
  const collectives::Choice& choose(const collectives::Shape& shape) const {
    const bool mine = !overrides_.empty();
    return collectives::select(topology_, limits_, shape, settings().oneShotBytes,
                               mine ? overrides_ : settings().algorithm,
                               mine ? "algorithm" : "SMDDP_ALGORITHM",
                               collectives::tuningFromSettings());
  }
  Entry build(const collectives::Shape& shape) {
    const collectives::Choice& choice = choose(shape);
    return {&uses_[fmt::format("{}/{}", toString(shape.collective), choice.name)],
            CachedPlan(choice.build(topology_, limits_, shape)), &choice};
  }
  Start startOf(collectives::Shape shape, const collectives::Choice& choice) const {
    if (shape.shared || shape.afterArrival) return Start::RunPlan;
    if (topology_.teamSize() == 1 || shape.collective == collectives::Collective::Barrier) {
      return Start::RunPlan;
    }
    shape.shared = true;
    if (choice.preamble == collectives::Preamble::Arrive || &choose(shape) != &choice) {
      return Start::AskMates;
    }
    const bool isOneShot = choice.preamble == collectives::Preamble::OneShot && shape.bytes > 0;
    return isOneShot ? Start::OneShot : Start::RunPlan;
  }

  struct Hash {
    size_t operator()(const collectives::Shape& shape) const {
      size_t hash = static_cast<size_t>(shape.bytes) * 0x9e3779b97f4a7c15;
      hash ^= static_cast<size_t>(shape.root) << 8 | static_cast<size_t>(shape.collective) << 1 |
              static_cast<size_t>(shape.shared);
      hash ^= static_cast<size_t>(shape.afterArrival) << 40;
      return hash;
    }
  };

  const plan::Topology& topology_;
  const plan::Limits& limits_;
  const std::string overrides_;
  std::unordered_map<collectives::Shape, std::unique_ptr<Entry>, Hash> entries_;
  std::map<std::string, AlgorithmUse> uses_;  // what Entry::use points into
  collectives::Shape lastShape_;
  const Entry* last_ = nullptr;
};

}  // namespace smddp::engine
