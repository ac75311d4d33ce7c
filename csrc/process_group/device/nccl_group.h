// One rank of a group of NCCL, which ends with the smddp group that owns it.
//
// What NCCL has enqueued waits for all ranks, until NCCL's own time-out. So when the smddp group fails, because a rank
// died or met an error, every rank aborts its part of the NCCL group. Then nothing waits any longer, and later calls
// throw the error that the smddp group failed with. Calls that were on the device have no result.
//
// Threads: any. Owns NCCL's backend. The action of Engine::onBreak() holds the object weakly.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#include "engine/engine.h"

namespace smddp::process_group::device {

class NcclGroup : public std::enable_shared_from_this<NcclGroup> {
 public:
  using Action = std::function<void(const Error&)>;

  // `before` runs when the group has failed, before the backend is aborted.
  static std::shared_ptr<NcclGroup> make(std::shared_ptr<engine::Engine> engine,
                                         std::shared_ptr<engine::groups::Group> group,
                                         c10::intrusive_ptr<c10d::Backend> backend,
                                         Action before = {});
  NcclGroup(std::shared_ptr<engine::Engine> engine, std::shared_ptr<engine::groups::Group> group,
            c10::intrusive_ptr<c10d::Backend> backend);

  c10d::Backend& backend() { return *backend_; }

  // Calls the backend. Throws the error that the group has failed with. An error of the backend makes the group fail.
  template <typename Call>
  auto call(const Call& call) {
    if (failed_.load(std::memory_order_acquire)) throwFailure();
    try {
      return call(*backend_);
    } catch (const c10::DistBackendError& error) {
      failed(error.what_without_backtrace());
    }
  }

  // Aborts once; a second caller waits for the first. May come during shutdown(), but not after it.
  void abort();
  void shutdown();

 private:
  [[noreturn]] void throwFailure() const;
  [[noreturn]] void failed(const std::string& what);

  const std::shared_ptr<engine::Engine> engine_;
  const std::shared_ptr<engine::groups::Group> group_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  std::atomic<bool> failed_{false};
  std::once_flag aborted_;
  std::atomic<bool> ended_{false};
};

// An error that one rank has met, as all ranks are told of it.
Error errorOfRank(Rank rank, const std::string& what);

}  // namespace smddp::process_group::device
