// One rank of a group of NCCL, which ends with the group that has it.
//
// What NCCL has enqueued waits for all ranks, for as long as NCCL's own time-out. So when the group fails, because a rank
// died or could not do its part, every rank aborts it: nothing waits any longer, and later calls throw what the group
// failed of. What was on the device then has no result.
//
// Threads: any. Owns the backend; what watches the group holds the object weakly.
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

  // before: what is to be done when the group has failed, before the backend is aborted.
  static std::shared_ptr<NcclGroup> make(std::shared_ptr<engine::Engine> engine,
                                         std::shared_ptr<engine::Group> group,
                                         c10::intrusive_ptr<c10d::Backend> backend,
                                         Action before = {});
  NcclGroup(std::shared_ptr<engine::Engine> engine, std::shared_ptr<engine::Group> group,
            c10::intrusive_ptr<c10d::Backend> backend);

  c10d::Backend& backend() { return *backend_; }

  // Calls the backend. Throws what the group has failed of; what the backend throws of its own fails the group.
  template <typename Call>
  auto call(const Call& call) {
    if (failed_.load(std::memory_order_acquire)) throwFailure();
    try {
      return call(*backend_);
    } catch (const c10::DistBackendError& error) {
      failed(error.what_without_backtrace());
    }
  }

  // Once; who comes second waits for the first. Not after shutdown(), but perhaps during it.
  void abort();
  void shutdown();

 private:
  [[noreturn]] void throwFailure() const;
  [[noreturn]] void failed(const std::string& what);

  const std::shared_ptr<engine::Engine> engine_;
  const std::shared_ptr<engine::Group> group_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  std::atomic<bool> failed_{false};
  std::once_flag aborted_;
  std::atomic<bool> ended_{false};
};

// An error that one rank has found by itself, as all are told of it.
Error errorOfRank(Rank rank, const std::string& what);

}  // namespace smddp::process_group::device
