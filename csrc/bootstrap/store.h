// The key-value store in which ranks meet before they can communicate. It is c10d's store; this interface has the five
// calls that we need.
//
// All groups share one store. It outlives them, also across restarts of processes, so it may contain old keys
// (rendezvous.h handles that). Nothing here deletes a key.
//
// Threads: one caller at a time per object. Values are never empty, because some stores cannot keep empty ones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/clock.h"

namespace smddp::bootstrap {

class Store {
 public:
  using Value = std::vector<std::byte>;

  virtual ~Store() = default;

  virtual void set(const std::string& key, const Value& value) = 0;
  // Waits until the key is set; throws ErrorKind::Timeout if that takes too long.
  virtual Value get(const std::string& key, Nanoseconds timeout) = 0;
  // Adds to a counter that starts at 0, and returns the sum. Atomic. No key is used for a counter and a value.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // True if get() would return at once.
  virtual bool contains(const std::string& key) = 0;
  // True if get() would return at once for each of these keys.
  virtual bool containsAll(const std::vector<std::string>& keys) {
    return std::all_of(keys.begin(), keys.end(), [this](const auto& key) { return contains(key); });
  }

  // Does get() for each key, in order, within one timeout. Stores that can do it in one round trip override it.
  virtual std::vector<Value> multiGet(const std::vector<std::string>& keys, Nanoseconds timeout) {
    const MonotonicClock clock;
    const Deadline deadline = Deadline::after(clock, timeout);
    std::vector<Value> values;
    values.reserve(keys.size());
    for (const auto& key : keys) {
      const Nanoseconds left = deadline.at - clock.now();
      values.push_back(get(key, left > 0 ? left : 0));
    }
    return values;
  }
};

}  // namespace smddp::bootstrap
