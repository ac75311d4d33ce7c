#include "engine/observe/metrics.h"

namespace smddp::engine::observe {

Metrics::Algorithm& Metrics::Group::algorithm(const std::string& collective,
                                              const std::string& name) {
  const MutexLock lock(mutex_);
  for (const auto& known : algorithms_) {
    if (known->collective_ == collective && known->name_ == name) return *known;
  }
  return *algorithms_.emplace_back(std::make_unique<Algorithm>(collective, name));
}

void Metrics::Group::countError(const std::string& collective, const std::string& kind) {
  const MutexLock lock(mutex_);
  ++errors_[{collective, kind}];
}

std::shared_ptr<Metrics::Group> Metrics::group(const std::string& name) {
  const MutexLock lock(mutex_);
  const bool isFull = groups_.size() >= kMaxGroups && !groups_.contains(name);
  const std::string known = isFull ? "(other groups)" : name;
  auto& group = groups_[known];
  if (!group) group = std::make_shared<Group>(known);
  return group;
}

Metrics::CallTotals Metrics::totalsOf(const Group& group, const Algorithm& algorithm, size_t size) {
  const Calls& calls = algorithm.bySize_[size];
  CallTotals totals;
  totals.group = group.name_;
  totals.collective = algorithm.collective_;
  totals.algorithm = algorithm.name_;
  totals.size = sizes::kNames[size];
  for (size_t i = 0; i < totals.byDuration.size(); ++i) {
    totals.byDuration[i] = calls.byDuration_[i].get();
    totals.calls += totals.byDuration[i];
  }
  totals.duration = static_cast<Nanoseconds>(calls.duration_.get());
  totals.bytes = calls.bytes_.get();
  totals.wireBytes = calls.wireBytes_.get();
  totals.waited.node = static_cast<Nanoseconds>(calls.waitedForNode_.get());
  totals.waited.network = static_cast<Nanoseconds>(calls.waitedForNetwork_.get());
  return totals;
}

Metrics::Totals Metrics::totals() const {
  Totals totals;
  const MutexLock lock(mutex_);
  for (const auto& [name, group] : groups_) {
    totals.stalls.push_back({name, group->stalls_.get()});
    const MutexLock groupLock(group->mutex_);
    for (const auto& [what, count] : group->errors_) {
      totals.errors.push_back({name, what.first, what.second, count});
    }
    for (const auto& algorithm : group->algorithms_) {
      for (size_t size = 0; size < sizes::kNames.size(); ++size) {
        auto calls = totalsOf(*group, *algorithm, size);
        if (calls.calls > 0) totals.calls.push_back(std::move(calls));
      }
    }
  }
  return totals;
}

}  // namespace smddp::engine::observe
