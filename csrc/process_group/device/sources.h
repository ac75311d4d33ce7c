// Memory of a device from which this process sends without a copy (SMDDP_GPU_DIRECT): libfabric's provider reads it
// (https://ofiwg.github.io/libfabric/main/man/fi_mr.3.html, FI_HMEM).
//
// An allocation of the driver holds many of torch's tensors. It is registered when the first of them is sent. The
// driver's number of the allocation identifies it, since the driver never uses a number twice, but it uses addresses
// again. When the next allocation is registered, those that have been freed since are forgotten. The engine does
// nothing else while it registers memory.
//
// Threads: any. No thread holds the lock while it waits for the engine, which may run continuations meanwhile. One
// object for all groups of the process, which share an endpoint; lives until the process ends.
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
  // `library`: the CUDA part, which tells allocations apart. Only the first call's counts; empty without a CUDA part.
  static DeviceSources& shared(const std::string& library);

  // Whether messages to other nodes may be sent from a tensor's memory. Logs once why not. No stream may be captured
  // meanwhile, since registering memory would end the capture. Throws as Engine::requireUsable().
  bool add(const at::Tensor& tensor);

 private:
  explicit DeviceSources(const std::string& library);
  struct Source {
    cuda::MemoryRange range;
    int device;
    bool isRegistered;  // false: the network cannot read it
  };
  // Whether it is registered; nothing where it is not known.
  std::optional<bool> find(const Source& source);
  // On the engine's owner.
  void enter(Source source);
  void forgetFreed();
  void refuse(const std::string& why);

  const std::shared_ptr<engine::Engine> engine_;
  const cuda::DeviceTable* table_ = nullptr;
  std::atomic<bool> isRefused_{false};  // the network reads no memory of devices; never set back
  std::mutex mutex_;
  std::map<uint64_t, Source>
      sources_;  // by where they begin; written by the engine's owner, with mutex_
};

}  // namespace smddp::process_group::device
