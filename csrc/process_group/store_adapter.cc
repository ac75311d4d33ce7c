#include "process_group/store_adapter.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "common/error.h"
#include "common/interrupt.h"

namespace smddp::process_group {
namespace {

constexpr std::chrono::milliseconds kSignalPeriod{50};
constexpr Nanoseconds kAfterSignal = 500'000'000;

bootstrap::Store::Value convert(const std::vector<uint8_t>& bytes) {
  const auto* first = reinterpret_cast<const std::byte*>(bytes.data());
  return {first, first + bytes.size()};
}

}  // namespace

StoreAdapter::StoreAdapter(c10::intrusive_ptr<c10d::Store> store, Nanoseconds patience)
    : store_(std::move(store)),
      patience_(patience),
      // A little later than the deadlines above, which have more to say.
      deadline_(Deadline::after(clock_, patience + 1'000'000'000)) {}

template <typename Call>
auto StoreAdapter::ask(Call call, const std::string& otherCause) {
  if (isSilent_) raiseSilence();
  using Answer = decltype(call(*store_));
  const auto task = std::make_shared<std::packaged_task<Answer()>>(
      [store = store_, call = std::move(call)] { return call(*store); });
  auto answer = task->get_future();
  try {
    std::thread([task] { (*task)(); }).detach();
  } catch (const std::system_error&) {
    // Without a thread, a store that is silent blocks this one. But the other ranks hear what is wrong here.
    (*task)();
  }
  while (answer.wait_for(kSignalPeriod) != std::future_status::ready) {
    if (deadline_.passed(clock_)) {
      isSilent_ = true;
      raiseSilence();
    }
    try {
      checkInterrupt();
    } catch (...) {
      // The caller still writes a note for the other ranks, for which this leaves a little time.
      deadline_ = std::min(deadline_, Deadline::after(clock_, kAfterSignal),
                           [](const Deadline& a, const Deadline& b) { return a.at < b.at; });
      throw;
    }
  }
  try {
    return answer.get();
  } catch (const c10::DistNetworkError& error) {
    raise(ErrorKind::PeerLost,
          "the store does not answer ({}): the process that serves it{}, which is rank 0 or "
          "torchrun on the first host, has ended or is cut off{}",
          error.what_without_backtrace(), place(), otherCause);
  }
}

void StoreAdapter::set(const std::string& key, const Value& value) {
  const auto* first = reinterpret_cast<const uint8_t*>(value.data());
  ask([key, bytes = std::vector<uint8_t>(first, first + value.size())](c10d::Store& store) {
    store.set(key, bytes);
  });
}

bootstrap::Store::Value StoreAdapter::get(const std::string& key, Nanoseconds timeout) {
  await({key}, timeout);
  return ask([key](c10d::Store& store) { return convert(store.get(key)); });
}

int64_t StoreAdapter::add(const std::string& key, int64_t amount) {
  return ask(
      [key, amount](c10d::Store& store) {
        try {
          return store.add(key, amount);
        } catch (const c10::DistNetworkError&) {
          throw;
        } catch (const std::exception& error) {
          // Other stores say neither what they could not read nor where.
          raise(ErrorKind::Transport,
                "the store cannot count under {} ({}): is another program using it?", key,
                error.what());
        }
      },
      // A TCPStore that cannot read the number closes the connection.
      fmt::format("; or another program has set {} to a text that is not a number", key));
}

bool StoreAdapter::containsAll(const std::vector<std::string>& keys) {
  return ask([keys](c10d::Store& store) { return store.check(keys); });
}

std::vector<bootstrap::Store::Value> StoreAdapter::multiGet(const std::vector<std::string>& keys,
                                                            Nanoseconds timeout) {
  if (!store_->hasExtendedApi()) return bootstrap::Store::multiGet(keys, timeout);
  await(keys, timeout);
  return ask([keys](c10d::Store& store) {
    std::vector<Value> values;
    for (const auto& value : store.multiGet(keys)) values.push_back(convert(value));
    return values;
  });
}

// Stores of different kinds and versions report a time-out in different ways. So any exception of wait() counts as one
// if keys are still unset.
void StoreAdapter::await(const std::vector<std::string>& keys, Nanoseconds timeout) {
  const std::chrono::milliseconds limit(std::max<Nanoseconds>(timeout / 1'000'000, 1));
  std::string why = ask([keys, limit](c10d::Store& store) -> std::string {
    try {
      store.wait(keys, limit);
      return {};
    } catch (const c10::DistNetworkError&) {
      throw;
    } catch (const std::exception& error) {
      return fmt::format(" {}", error.what());
    }
  });
  if (!why.empty()) raise(ErrorKind::Timeout, "the store has no {} yet:{}", keys.front(), why);
}

std::string StoreAdapter::place() const {
  c10::intrusive_ptr<c10d::Store> store = store_;
  while (const auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    store = const_cast<c10d::PrefixStore*>(prefixed)->getUnderlyingStore();
  }
  const auto* served = dynamic_cast<c10d::TCPStore*>(store.get());
  return served == nullptr ? "" : fmt::format(" at {}:{}", served->getHost(), served->getPort());
}

void StoreAdapter::raiseSilence() const {
  raise(ErrorKind::Timeout,
        "the store{} has not answered within {:.1f} s: the process that serves it, which is rank 0 "
        "or "
        "torchrun on that host, is stopped, or the host is cut off",
        place(), static_cast<double>(patience_) * 1e-9);
}

}  // namespace smddp::process_group
