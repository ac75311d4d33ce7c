// This rank's region (region.h) of one group, from before the group exists until nobody can read it any more.
//
// Owns the memory. Used by the thread that owns the engine, except for the destructor.
#pragma once

#include <memory>
#include <span>

#include "engine/calls/break.h"
#include "engine/memory/region.h"
#include "engine/memory/region_pool.h"
#include "engine/process/process.h"
#include "engine/team/membership.h"

namespace smddp::engine::team {

class OwnRegion {
 public:
  // Throws Resource.
  OwnRegion(process::Process& process, const memory::RegionLayout& layout);
  // Gives the memory back, if no mate may still read it; else keeps it until the process ends.
  ~OwnRegion();
  OwnRegion(const OwnRegion&) = delete;
  OwnRegion& operator=(const OwnRegion&) = delete;

  // The entry that tells the other ranks of it.
  const GroupEntry& entry() const { return entry_; }
  const memory::RegionLayout& layout() const { return layout_; }
  std::span<std::byte> bytes() const { return bytes_; }
  memory::RegionHeader& header() const {
    return *reinterpret_cast<memory::RegionHeader*>(bytes_.data());
  }
  // Mates read the region from now on.
  void expectReaders() { mayBeRead_ = true; }
  // No mate can touch it any more.
  void allowGiveBack() { mayBeRead_ = false; }
  // Tells mates of the break, also those that read the region later.
  void publishBreak(const calls::Break& broken);

 private:
  const Ownership& ownership_;
  const std::shared_ptr<memory::RegionPool> pool_;  // outlives the process object
  const memory::RegionLayout layout_;
  const std::span<std::byte> bytes_;
  GroupEntry entry_;
  bool mayBeRead_ = false;
};

}  // namespace smddp::engine::team
