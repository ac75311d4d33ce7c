// Shape -> plan. A training step repeats the same few shapes, so building a plan costs nothing in the end.
//
// Used by the thread that owns the engine. Plans live as long as the cache.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include "collectives/selection.h"
#include "common/config.h"
#include "common/log.h"
#include "engine/executor.h"

namespace smddp::engine {

class PlanCache {
 public:
  PlanCache(const plan::Topology& topology, const plan::Limits& limits)
      : topology_(topology), limits_(limits) {}

  struct Entry {
    std::string name;  // "allreduce/direct"
    CachedPlan plan;
  };

  const Entry& get(const collectives::Shape& shape) {
    if (last_ != nullptr && lastShape_ == shape) return *last_;
    auto& slot = entries_[shape];
    if (!slot) {
      const collectives::Choice& choice = choose(shape);
      slot = std::make_unique<Entry>(fmt::format("{}/{}", toString(shape.collective), choice.name),
                                     CachedPlan(choice.build(topology_, limits_, shape)));
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
  const collectives::Choice& choose(const collectives::Shape& shape) const {
    return collectives::select(topology_, limits_, shape, settings().oneShotBytes,
                               settings().algorithm);
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
  std::unordered_map<collectives::Shape, std::unique_ptr<Entry>, Hash> entries_;
  collectives::Shape lastShape_;
  const Entry* last_ = nullptr;
};

}  // namespace smddp::engine
