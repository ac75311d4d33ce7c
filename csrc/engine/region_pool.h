// Regions of groups (region.h) in this process's slab, used again and again for that purpose alone.
//
// A mate that has yet to notice that its group is over looks at the header of a region that its owner has given
// up: it finds another group's number there, never bytes that mean something else.
//
// Thread-safe: a group may end with the last reference to it, on any thread.
#pragma once

#include <memory>
#include <span>

#include "engine/region.h"
#include "engine/spare_memory.h"
#include "transport/shm/slab.h"

namespace smddp::engine {

class RegionPool {
 public:
  explicit RegionPool(std::shared_ptr<transport::shm::Slab> slab) : slab_(std::move(slab)) {}

  // A region with headers as constructed, which belongs to no group yet: its owner stores RegionHeader::group last.
  // Throws Resource when the slab is full.
  std::span<std::byte> take(const RegionLayout& layout);
  // `region` as take() returned it for `layout`. No mate is in an operation of its group.
  void giveBack(std::span<std::byte> region, const RegionLayout& layout);

 private:
  const std::shared_ptr<transport::shm::Slab> slab_;
  SpareMemory spare_;
};

}  // namespace smddp::engine
