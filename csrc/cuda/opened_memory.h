// Memory of another process on the same GPU, mapped into this one.
//
// A process opens an allocation once, for all its groups. If the owner has freed the allocation and made another one at
// the same address, the old one must be closed before the new one is opened, or the driver might confuse them.
//
// Closed when nobody holds the object, or when another allocation has taken the place of this one. Its holders have no
// kernel under way then, since an owner frees tensors after the calls that use them.
#pragma once

#include <cstddef>
#include <memory>

#include "cuda/device_table.h"

namespace smddp::cuda {

class OpenedMemory {
 public:
  // Throws Transport. Thread-safe.
  static std::shared_ptr<OpenedMemory> open(const DeviceTable& table, int device, uint64_t process,
                                            const MemoryName& name);
  OpenedMemory(const DeviceTable& table, int device, uint64_t allocation, void* base)
      : table_(table), device_(device), allocation_(allocation), base_(base) {}
  ~OpenedMemory();
  OpenedMemory(const OpenedMemory&) = delete;
  OpenedMemory& operator=(const OpenedMemory&) = delete;

  bool is(const MemoryName& name) const { return allocation_ == name.allocation; }
  std::byte* at(uint64_t offset) const { return static_cast<std::byte*>(base_) + offset; }

 private:
  void close();

  const DeviceTable& table_;
  const int device_;
  const uint64_t allocation_;
  void* base_;  // null when closed
};

}  // namespace smddp::cuda
