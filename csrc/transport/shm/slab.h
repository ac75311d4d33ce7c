// The slab: the shared memory of one process. It has a control page, and behind that the memory that the engine
// allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "common/clock.h"
#include "common/file_descriptor.h"
#include "common/mutex.h"
#include "transport/shm/process_page.h"
#include "transport/shm/region_allocator.h"
#include "transport/shm/segment.h"

namespace smddp::transport::shm {

// Our own slab; one per process (several if ranks are threads). Allocation is thread-safe.
// Ends with the last shared_ptr, which tells the mates that we left. Mates keep their mappings.
class Slab {
 public:
  // This is address space, not memory, of which a process has 128 TiB. A group takes 64 MiB of it by default, so it is
  // enough for 4000 groups; and 256 processes can map one another's. create() tries half of it if the system refuses.
  static constexpr size_t kDefaultReserve = size_t{256} << 30;
  // If the address space is limited (ulimit -v), at most this, to leave room for the slabs of the mates.
  static constexpr size_t kReserveOfLimited = size_t{16} << 30;
  static constexpr size_t kLeastReserve = size_t{256} << 20;

  static std::shared_ptr<Slab> create(size_t reserve = kDefaultReserve);
  explicit Slab(std::shared_ptr<Segment> segment);
  ~Slab();

  ProcessPage& page() const { return *reinterpret_cast<ProcessPage*>(segment_->data()); }
  const SegmentAddress& address() const { return segment_->address(); }
  std::byte* data() const { return segment_->data(); }
  size_t size() const { return segment_->size(); }

  // Returns zeroed, sparse memory in whole pages. Throws Resource if the slab is full.
  std::span<std::byte> allocate(size_t bytes, size_t align = Segment::kPage);
  // Takes `memory` as allocate() returned it. Its pages go back to the system at once. If some of them are kept
  // (keep()), all of it stays allocated for ever.
  void free(std::span<std::byte> memory);
  // Gives the whole pages of `memory`, except kept ones, back to the system; then they read as zeros.
  void discard(std::span<std::byte> memory);
  // Marks pages that are registered with a network card. The card goes on using them, so they must never be given back.
  void keep(std::span<std::byte> memory);
  bool keeps(std::span<std::byte> memory) const;
  // Backs `memory`, so that touching it later cannot fail. Throws Resource.
  void commit(std::span<std::byte> memory);
  // Mates name a place in this slab by this offset.
  uint64_t offsetOf(const void* pointer) const;

 private:
  using Range = std::pair<uint64_t, uint64_t>;  // of offsets, in whole pages
  Range pagesOf(std::span<std::byte> memory) const;
  bool keeps(const Range& range) const SMDDP_REQUIRES(mutex_);

  std::shared_ptr<Segment> segment_;
  mutable Mutex mutex_;
  RegionAllocator regions_ SMDDP_GUARDED_BY(mutex_);
  std::map<uint64_t, uint64_t> kept_ SMDDP_GUARDED_BY(mutex_);  // begin -> end, disjoint
};

// The slab of a mate. Owns the mapping and the local state about the mate. Used by the thread that owns the engine.
// Stays readable after the mate has died.
class Mate {
 public:
  // Throws Transport if the process is gone or runs another build, Resource if mapping fails.
  static std::shared_ptr<Mate> attach(const SegmentAddress& address);
  explicit Mate(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  ProcessPage& page() const { return *reinterpret_cast<ProcessPage*>(segment_->data()); }
  const SegmentAddress& address() const { return segment_->address(); }
  std::byte* data() const { return segment_->data(); }
  size_t size() const { return segment_->size(); }

  // The state of lifeOf() and Doorbell::ring() for this mate.
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
