// The shared memory of one process: a control page, and behind it whatever the engine allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "common/clock.h"
#include "common/file_descriptor.h"
#include "transport/shm/process_page.h"
#include "transport/shm/region_allocator.h"
#include "transport/shm/segment.h"

namespace smddp::transport::shm {

// Our own slab; one per process (several where ranks are threads). Allocation is thread-safe.
// Ends with the last shared_ptr, which tells the mates that we left. Mates keep what they have
// mapped.
class Slab {
 public:
  // Address space, not memory. Enough for any number of groups; halved where the system refuses it.
  static constexpr size_t kDefaultReserve = size_t{16} << 30;
  static constexpr size_t kLeastReserve = size_t{256} << 20;

  static std::shared_ptr<Slab> create(size_t reserve = kDefaultReserve);
  explicit Slab(std::shared_ptr<Segment> segment);
  ~Slab();

  ProcessPage& page() const { return *reinterpret_cast<ProcessPage*>(segment_->data()); }
  const SegmentAddress& address() const { return segment_->address(); }
  std::byte* data() const { return segment_->data(); }
  size_t size() const { return segment_->size(); }

  // Zeroed, sparse, in whole pages. Throws Resource when the slab is full.
  std::span<std::byte> allocate(size_t bytes, size_t align = Segment::kPage);
  // `memory` exactly as allocate() returned it; its pages go back to the system at once. If some of them are kept all
  // of it stays allocated, for good.
  void free(std::span<std::byte> memory);
  // Gives the pages of `memory`, whole ones, back to the system: they read as zeros. But for those that are kept.
  void discard(std::span<std::byte> memory);
  // A network card has been told of these pages: whatever lies in their place later, it goes on using them.
  void keep(std::span<std::byte> memory);
  bool keeps(std::span<std::byte> memory) const;
  // Reserves backing, so that touching `memory` cannot fail later. Throws Resource.
  void commit(std::span<std::byte> memory);
  // How mates name a place in this slab.
  uint64_t offsetOf(const void* pointer) const;

 private:
  using Range = std::pair<uint64_t, uint64_t>;  // of offsets, in whole pages
  Range pagesOf(std::span<std::byte> memory) const;
  bool keeps(const Range& range) const;

  std::shared_ptr<Segment> segment_;
  mutable std::mutex mutex_;
  RegionAllocator regions_;            // guarded by mutex_
  std::map<uint64_t, uint64_t> kept_;  // begin -> end, disjoint; the same
};

// The slab of another process, as seen from here. Owns the mapping and what this process remembers
// about that one. Belongs to the thread that owns the engine. Stays readable after the mate died.
class Mate {
 public:
  // Throws Transport when the process is gone or runs another build, Resource when mapping fails.
  static std::shared_ptr<Mate> attach(const SegmentAddress& address);
  explicit Mate(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  ProcessPage& page() const { return *reinterpret_cast<ProcessPage*>(segment_->data()); }
  const SegmentAddress& address() const { return segment_->address(); }
  std::byte* data() const { return segment_->data(); }
  size_t size() const { return segment_->size(); }

  // State of lifeOf() and Doorbell::ring() for this mate.
  struct Probe {
    uint32_t calls = 0;
    Nanoseconds next = 0;
    FileDescriptor wakePipe;
    uint64_t wakePipeInode = 0;
  };
  Probe& probe() { return probe_; }

 private:
  std::shared_ptr<Segment> segment_;
  Probe probe_;
};

}  // namespace smddp::transport::shm
