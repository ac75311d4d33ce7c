// Memory of a device that this process sends from as it lies there (SMDDP_GPU_DIRECT): libfabric's provider reads it, and
// neither the host nor the device copies it (https://ofiwg.github.io/libfabric/main/man/fi_mr.3.html, FI_HMEM).
//
// What is registered is an allocation of the driver's, of which torch's allocator makes many tensors, when the first of
// them is sent. It is known by the number that the driver gave it, which is never used twice: memory that has been freed
// is forgotten when the next one is registered, not taken for what lies at the same address now. Registering keeps the
// engine for as long as it takes.
//
// Threads: any; nobody holds the lock while he waits for the engine, which may run anybody's continuations meanwhile. One
// for all groups of the process, which share an endpoint; lives until the process ends.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "cuda/device_table.h"
#include "engine/engine.h"

namespace smddp::process_group::device {

class DeviceSources {
 public:
  // `library`: the CUDA part, which knows of allocations, at the first call; empty without.
  static DeviceSources& shared(const std::string& library);

  // Whether messages to other nodes may be sent from a tensor's memory. Says once why not. Its caller sees to it that no
  // stream is captured, which registering would spoil. Throws as Engine::requireUsable().
  bool add(const at::Tensor& tensor);

 private:
  explicit DeviceSources(const std::string& library);
  struct Source {
    cuda::MemoryRange range;
    int device;
    bool isRegistered;  // else it cannot be
  };
  // Nothing: not known.
  std::optional<bool> find(const Source& source);
  // On the engine's owner.
  void enter(Source source);
  void forgetFreed();
  void refuse(const std::string& why);

  const std::shared_ptr<engine::Engine> engine_;
  const cuda::DeviceTable* table_ = nullptr;
  std::atomic<bool> isRefused_{false};  // for good
  std::mutex mutex_;
  std::map<uint64_t, Source>
      sources_;  // by where they begin; written by the engine's owner, with mutex_
};

}  // namespace smddp::process_group::device
