// Regions of groups (region.h) in this process's slab. Memory that was a region is used for regions only.
//
// So a mate that has not noticed yet that its group is over may look at the header of a region that its owner has given
// up. It finds another group's number there, never bytes that mean something else.
//
// Thread-safe: a group may end with the last reference to it, on any thread.
#pragma once

#include <memory>
#include <span>

#include "engine/memory/region.h"
#include "engine/memory/spare_memory.h"
#include "transport/shm/slab.h"

namespace smddp::engine::memory {

class RegionPool {
 public:
  explicit RegionPool(std::shared_ptr<transport::shm::Slab> slab) : slab_(std::move(slab)) {}

  // A region whose headers are in their initial state. It belongs to no group until the caller stores
  // RegionHeader::group. Throws Resource when the slab is full.
  std::span<std::byte> take(const RegionLayout& layout);
  // `region` as take() returned it for `layout`. No mate may still be in an operation of its group.
  void giveBack(std::span<std::byte> region, const RegionLayout& layout);

 private:
  const std::shared_ptr<transport::shm::Slab> slab_;
  SpareMemory spare_;
};

}  // namespace smddp::engine::memory
