// A store for ranks that are threads of one process.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "bootstrap/store.h"
#include "common/error.h"

namespace smddp::test {

// Any thread may call all methods. Where c10d's stores differ from each other, this one is strict: an empty value, or a
// counter read as a value, is an error.
class LocalStore : public bootstrap::Store {
 public:
  void set(const std::string& key, const Value& value) override {
    SMDDP_CHECK(!value.empty(), "{} would be empty", key);
    const std::lock_guard lock(mutex_);
    ++numCalls_;
    values_[key] = value;
    changed_.notify_all();
  }

  Value get(const std::string& key, Nanoseconds timeout) override {
    std::unique_lock lock(mutex_);
    ++numCalls_;
    const bool isThere = changed_.wait_for(lock, std::chrono::nanoseconds(timeout),
                                           [&] { return values_.contains(key); });
    if (!isThere) raise(ErrorKind::Timeout, "nobody has set {}", key);
    return values_.at(key);
  }

  int64_t add(const std::string& key, int64_t amount) override {
    const std::lock_guard lock(mutex_);
    ++numCalls_;
    int64_t& counter = counters_[key];
    // Wraps around, as in stores that are written in other languages.
    return counter =
               static_cast<int64_t>(static_cast<uint64_t>(counter) + static_cast<uint64_t>(amount));
  }

  // Not counted, because how often somebody asks depends on time.
  bool contains(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    return values_.contains(key);
  }

  // One call, as in TCPStore.
  std::vector<Value> multiGet(const std::vector<std::string>& keys, Nanoseconds timeout) override {
    auto values = Store::multiGet(keys, timeout);
    const std::lock_guard lock(mutex_);
    numCalls_ -= keys.size() - 1;
    return values;
  }

  size_t numCalls() const {
    const std::lock_guard lock(mutex_);
    return numCalls_;
  }
  size_t numKeys() const {
    const std::lock_guard lock(mutex_);
    return values_.size() + counters_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Value> values_;
  std::map<std::string, int64_t> counters_;
  size_t numCalls_ = 0;
};

}  // namespace smddp::test
