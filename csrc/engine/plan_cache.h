// Shape -> plan. A training step repeats the same few shapes, so building a plan costs nothing in the end.
//
// Used by the thread that owns the engine. Plans live as long as the cache.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include "collectives/selection.h"
#include "collectives/tuning.h"
#include "common/config.h"
#include "common/log.h"
#include "engine/executor.h"

namespace smddp::engine {

class PlanCache {
 public:
  // overrides: what the group asks for, as SMDDP_ALGORITHM does; that decides where it is empty.
  PlanCache(const plan::Topology& topology, const plan::Limits& limits, std::string overrides)
      : topology_(topology), limits_(limits), overrides_(std::move(overrides)) {}

  struct Entry {
    std::string name;  // "allreduce/direct"
    CachedPlan plan;
  };

  const Entry& get(const collectives::Shape& shape) {
    if (last_ != nullptr && lastShape_ == shape) return *last_;
    auto& slot = entries_[shape];
    if (!slot) {
      slot = std::make_unique<Entry>(build(shape));
      // Executions of shared buffers choose after the arrival: what a plan does before it would be left
      // out. The private plan does nothing then (else ignoresSharing()), and serves any buffer.
      if (shape.shared && slot->plan.plan.preamble.numSteps > kBareArrival) {
        *slot = build({shape.collective, shape.bytes, shape.root, /*shared=*/false});
      }
      SMDDP_LOG(Debug, "engine", "{} of {} bytes: {}", toString(shape.collective), shape.bytes,
                slot->plan.plan.name);
    }
    lastShape_ = shape;
    last_ = slot.get();
    return *slot;
  }

  // Whether there is only the staged plan, wherever the buffers lie. A plan that copies before the arrival must
  // be of this kind: its choice cannot wait for what the arrival tells.
  bool ignoresSharing(collectives::Shape shape) {
    if (topology_.teamSize() == 1 || shape.collective == collectives::Collective::Barrier)
      return true;
    shape.shared = false;
    return get(shape).plan.plan.preamble.numSteps > kBareArrival;
  }

 private:
  Entry build(const collectives::Shape& shape) const {
    const bool mine = !overrides_.empty();
    const collectives::Choice& choice = collectives::select(
        topology_, limits_, shape, settings().oneShotBytes,
        mine ? overrides_ : settings().algorithm, mine ? "algorithm" : "SMDDP_ALGORITHM",
        collectives::tuningFromSettings());
    return {fmt::format("{}/{}", toString(shape.collective), choice.name),
            CachedPlan(choice.build(topology_, limits_, shape))};
  }
  // Signal, Wait.
  static constexpr uint32_t kBareArrival = 2;

  struct Hash {
    size_t operator()(const collectives::Shape& shape) const {
      size_t hash = static_cast<size_t>(shape.bytes) * 0x9e3779b97f4a7c15;
      hash ^= static_cast<size_t>(shape.root) << 8 | static_cast<size_t>(shape.collective) << 1 |
              static_cast<size_t>(shape.shared);
      return hash;
    }
  };

  const plan::Topology& topology_;
  const plan::Limits& limits_;
  const std::string overrides_;
  std::unordered_map<collectives::Shape, std::unique_ptr<Entry>, Hash> entries_;
  collectives::Shape lastShape_;
  const Entry* last_ = nullptr;
};

}  // namespace smddp::engine
