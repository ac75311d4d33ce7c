// The key-value store that ranks meet in before they can talk: c10d's, behind the five calls we
// need of it.
//
// One store is shared by all groups and outlives them, also across restarts of the processes, so
// keys that somebody left behind are an ordinary sight (rendezvous.h copes with them). Nothing here
// deletes a key.
//
// Threads: one caller at a time per object. Values are never empty: some stores cannot keep those.
#pragma once

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
  // Waits until somebody has set the key; throws ErrorKind::Timeout when nobody did in time.
  virtual Value get(const std::string& key, Nanoseconds timeout) = 0;
  // Adds to a counter that starts at 0 and returns the sum. Atomic. Counters and values share no
  // keys.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // Whether get() would return at once.
  virtual bool contains(const std::string& key) = 0;

  // get() of each key, in their order, within one timeout. Stores that can do it in one round trip
  // override it.
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
