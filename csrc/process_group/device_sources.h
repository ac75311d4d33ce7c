// Memory of a device that this process sends from as it lies there (SMDDP_GPU_DIRECT): libfabric's provider reads it, and
// neither the host nor the device copies it (https://ofiwg.github.io/libfabric/main/man/fi_mr.3.html, FI_HMEM).
//
// What is registered is an allocation of the driver's, of which torch's allocator makes many tensors, when the first of
// them is sent. It is known by the number that the driver gave it, which is never used twice: memory that has been freed
// is forgotten, not taken for what lies at the same address now.
//
// Threads: any. One for all groups of the process, which share an endpoint; lives until the process ends.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cuda/device_table.h"
#include "engine/engine.h"

namespace smddp::process_group {

class DeviceSources {
 public:
  // `library`: the CUDA part, which knows of allocations; empty without.
  static DeviceSources& shared(const std::string& library);

  // Whether messages to other nodes may be sent from a tensor's memory. Says once why not. Not while a stream is captured.
  bool add(const at::Tensor& tensor);

 private:
  explicit DeviceSources(const std::string& library);
  struct Source {
    cuda::MemoryRange range;
    int device;
  };
  std::string enter(const Source& source);
  void forgetFreed();
  bool refuse(const std::string& why);

  const std::shared_ptr<engine::Engine> engine_;
  std::mutex mutex_;
  const cuda::DeviceTable* table_ = nullptr;
  bool isRefused_ = false;              // for good; guarded by mutex_
  std::map<uint64_t, Source> sources_;  // by where they begin; guarded by mutex_
};

}  // namespace smddp::process_group
