// c10d's store with the interface that bootstrap needs.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <string>
#include <vector>

#include "bootstrap/store.h"
#include "common/clock.h"

namespace smddp::process_group {

// Each call runs on a thread of its own, because c10d's stores wait for their server's answer whatever time-out they
// are given: for ever, if its process is stopped or its host is cut off. The caller waits until the deadline of the
// group that it makes, and hears signals meanwhile; then the thread is left behind with what it uses. After the
// deadline later calls of this object fail at once.
class StoreAdapter final : public bootstrap::Store {
 public:
  // `patience`: how long all calls together may take.
  StoreAdapter(c10::intrusive_ptr<c10d::Store> store, Nanoseconds patience);

  void set(const std::string& key, const Value& value) override;
  Value get(const std::string& key, Nanoseconds timeout) override;
  int64_t add(const std::string& key, int64_t amount) override;
  bool contains(const std::string& key) override { return containsAll({key}); }
  bool containsAll(const std::vector<std::string>& keys) override;
  std::vector<Value> multiGet(const std::vector<std::string>& keys, Nanoseconds timeout) override;

 private:
  // Runs a call of the store. If its connection breaks, the error says that the process of the store is gone, or what
  // else may be the cause. `call` owns what it uses.
  template <typename Call>
  auto ask(Call call, const std::string& otherCause = "");
  void await(const std::vector<std::string>& keys, Nanoseconds timeout);
  // " at host:port", if it has an address.
  std::string place() const;
  [[noreturn]] void raiseSilence() const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const MonotonicClock clock_;
  const Nanoseconds patience_;
  Deadline deadline_;
  bool isSilent_ = false;
};

}  // namespace smddp::process_group
