// Receive windows of channels in this process's slab.
//
// One whose pages a network card knows (Slab::keep) is never given back, but used again: the card would write to those
// pages for ever, whatever lies in their place.
//
// Thread-safe: a group may end with the last reference to it, on any thread.
#pragma once

#include <memory>
#include <span>

#include "engine/spare_memory.h"
#include "transport/shm/slab.h"

namespace smddp::engine {

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

}  // namespace smddp::engine
