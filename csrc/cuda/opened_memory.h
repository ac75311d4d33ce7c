// Memory of another process on the same GPU, as this one sees it.
//
// A process opens an allocation once, for all its groups: where its owner has freed it and something else lies at the
// same address, the old one has to be closed before the new one is opened, or the driver might take them for the same.
//
// Closed when nobody holds it, or when it has turned out to be gone: whoever held it has no kernel under way then, as
// owners free tensors after the calls with them.
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
