// Receive windows of channels in this process's slab.
//
// A window whose pages a network card knows (Slab::keep) is never given back to the slab, but used again as a window.
// The card could still write to those pages, whatever they held by then.
//
// Thread-safe: a group may end with the last reference to it, on any thread.
#pragma once

#include <memory>
#include <span>

#include "engine/memory/spare_memory.h"
#include "transport/shm/slab.h"

namespace smddp::engine::memory {

class WindowPool {
 public:
  explicit WindowPool(std::shared_ptr<transport::shm::Slab> slab) : slab_(std::move(slab)) {}

  // Backed memory, contents arbitrary. Throws Resource when the slab is full.
  std::span<std::byte> take(size_t bytes);
  // Nobody writes into it any more.
  void giveBack(std::span<std::byte> window);

 private:
  const std::shared_ptr<transport::shm::Slab> slab_;
  SpareMemory spare_;
};

}  // namespace smddp::engine::memory
