// c10d's store with the interface that bootstrap needs.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

#include "bootstrap/store.h"
#include "common/error.h"

namespace smddp::process_group {

// Runs a call of the store. If its connection breaks, the error says that the process of the store is gone, or what
// else may be the cause.
template <typename Call>
auto ask(Call call, const std::string& otherCause = "") {
  try {
    return call();
  } catch (const c10::DistNetworkError& error) {
    raise(ErrorKind::PeerLost,
          "the store does not answer ({}): the process that serves it, which is rank 0 or "
          "torchrun on the first host, has ended or is cut off{}",
          error.what_without_backtrace(), otherCause);
  }
}

class StoreAdapter final : public bootstrap::Store {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const Value& value) override {
    const auto* first = reinterpret_cast<const uint8_t*>(value.data());
    ask([&] { store_->set(key, std::vector<uint8_t>(first, first + value.size())); });
  }
  Value get(const std::string& key, Nanoseconds timeout) override {
    await({key}, timeout);
    return ask([&] { return convert(store_->get(key)); });
  }
  int64_t add(const std::string& key, int64_t amount) override {
    try {
      // A TCPStore that cannot read the number closes the connection.
      return ask(
          [&] { return store_->add(key, amount); },
          fmt::format("; or another program has set {} to a text that is not a number", key));
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      // Other stores say neither what they could not read nor where.
      raise(ErrorKind::Transport,
            "the store cannot count under {} ({}): is another program using it?", key,
            error.what());
    }
  }
  bool contains(const std::string& key) override {
    return ask([&] { return store_->check({key}); });
  }
  bool containsAll(const std::vector<std::string>& keys) override {
    return ask([&] { return store_->check(keys); });
  }
  std::vector<Value> multiGet(const std::vector<std::string>& keys, Nanoseconds timeout) override {
    if (!store_->hasExtendedApi()) return bootstrap::Store::multiGet(keys, timeout);
    await(keys, timeout);
    return ask([&] {
      std::vector<Value> values;
      for (const auto& value : store_->multiGet(keys)) values.push_back(convert(value));
      return values;
    });
  }

 private:
  // Stores of different kinds and versions report a time-out in different ways. So any exception of wait() counts as
  // one if keys are still unset.
  void await(const std::vector<std::string>& keys, Nanoseconds timeout) {
    const std::chrono::milliseconds limit(std::max<Nanoseconds>(timeout / 1'000'000, 1));
    try {
      ask([&] { store_->wait(keys, limit); });
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      raise(ErrorKind::Timeout, "the store has no {} yet: {}", keys.front(), error.what());
    }
  }
  static Value convert(const std::vector<uint8_t>& bytes) {
    const auto* first = reinterpret_cast<const std::byte*>(bytes.data());
    return {first, first + bytes.size()};
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace smddp::process_group
