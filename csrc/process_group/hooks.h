// Functions that torch's tools register on a group: its Flight Recorder wants to know when a call has ended, and dumps what
// it has seen when one fails (torch's Hooks.hpp).
//
// Threads: any. No lock is held while a function runs. One that is removed while it runs ends its run. What one throws is
// logged: it is not the fault of the call.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "common/log.h"

namespace smddp::process_group {

template <typename... Arguments>
class HookList {
 public:
  using Hook = std::function<void(Arguments...)>;

  void add(int64_t id, Hook hook) {
    change([&](Hooks& hooks) { hooks[id] = std::move(hook); });
  }
  void remove(int64_t id) {
    change([&](Hooks& hooks) { hooks.erase(id); });
  }
  bool empty() const { return isEmpty_.load(std::memory_order_relaxed); }
  void run(Arguments... arguments) const {
    if (empty()) return;
    const auto hooks = hooks_.load();
    for (const auto& [id, hook] : *hooks) {
      try {
        hook(arguments...);
      } catch (const std::exception& error) {
        SMDDP_LOG(Warn, "process_group", "a hook has failed: {}", error.what());
      }
    }
  }

 private:
  using Hooks = std::map<int64_t, Hook>;
  // Those that run see the old list, so the change is made to a copy.
  template <typename Change>
  void change(Change apply) {
    const std::lock_guard lock(mutex_);
    auto changed = std::make_shared<Hooks>(*hooks_.load());
    apply(*changed);
    isEmpty_.store(changed->empty(), std::memory_order_relaxed);
    hooks_.store(std::move(changed));
  }

  std::mutex mutex_;  // of changes
  std::atomic<std::shared_ptr<const Hooks>> hooks_{std::make_shared<const Hooks>()};
  std::atomic<bool> isEmpty_{true};
};

struct Hooks {
  // A call has ended without an error: Work::completionKey(), and the milliseconds that it took.
  HookList<uint64_t, float> completion;
  // The group has failed, or is about to be aborted.
  HookList<> abort;
};

}  // namespace smddp::process_group
