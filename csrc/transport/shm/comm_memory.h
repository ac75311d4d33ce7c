// Communication memory: memory for tensors that mates can map. They read and write it in place, without staging.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "common/mutex.h"
#include "transport/shm/region_allocator.h"
#include "transport/shm/slab.h"

namespace smddp::transport::shm {

// A place in the communication memory of some process. Trivially copyable, without padding: it is
// published in shared memory. Copy it before use; MateMemory checks every field.
struct Location {
  SegmentAddress segment;
  uint64_t offset = 0;
  uint32_t index = 0;  // of the segment in its owner's ProcessPage::commSegments
  uint32_t reserved = 0;
};
static_assert(sizeof(Location) == 48);

// Allocates blocks from our own segments: one segment per large block, arenas for small ones. Every
// block is backed by memory when it is allocated, so touching it cannot fail. Freed memory is cached for
// reuse, up to a limit.
//
// Threads: any, because tensors may be freed on any thread. Ends: after its blocks; the holder of a block keeps this
// object alive. In a forked child allocate() throws and free() does nothing, because the memory is the parent's.
class CommMemory {
 public:
  // The segments are announced in the control page of `slab`. Keeps at most `cacheBytes` of freed memory.
  CommMemory(std::shared_ptr<Slab> slab, size_t cacheBytes);
  ~CommMemory();
  CommMemory(const CommMemory&) = delete;
  CommMemory& operator=(const CommMemory&) = delete;

  // Returns memory with arbitrary contents, aligned to 64 bytes (large blocks: to a page). Throws Resource; the caller
  // then uses ordinary memory.
  void* allocate(size_t bytes);
  // Throws Internal for a pointer that allocate() did not return, or that was freed before.
  void free(void* block);
  // The location of [pointer, pointer + bytes) for mates. nullopt unless all of it lies in one block.
  std::optional<Location> locate(const void* pointer, size_t bytes) const;

  // The bytes taken from the system, in use or cached.
  size_t heldBytes() const;

  static constexpr size_t kLargeBytes = size_t{1} << 20;
  static constexpr size_t kLargeGranule = size_t{2} << 20;
  static constexpr size_t kArenaBytes = size_t{4} << 20;
  static constexpr size_t kAlignment = 64;

 private:
  struct Chunk {
    std::shared_ptr<Segment> segment;
    uint32_t index = 0;
    std::optional<RegionAllocator> arena;  // nullopt: the chunk is one large block
    std::map<uint64_t, uint64_t> blocks;   // the blocks in use: offset -> bytes
  };
  using Chunks = std::map<uintptr_t, Chunk>;  // by address of the first byte

  void* allocateLarge(size_t bytes);
  void* allocateSmall(size_t bytes);
  void* takeCached(size_t bytes) SMDDP_REQUIRES(mutex_);
  void* takeFromArena(size_t bytes) SMDDP_REQUIRES(mutex_);
  std::shared_ptr<Segment> makeSegment(size_t bytes);
  Chunk& announce(std::shared_ptr<Segment> segment) SMDDP_REQUIRES(mutex_);
  std::vector<Chunk> trimCache(size_t limit) SMDDP_REQUIRES(mutex_);
  Chunks::iterator drop(Chunks::iterator chunk, std::vector<Chunk>& dropped) SMDDP_REQUIRES(mutex_);
  void release(const std::vector<Chunk>& chunks) SMDDP_EXCLUDES(mutex_);
  Chunks::iterator chunkOf(const void* pointer) SMDDP_REQUIRES(mutex_);

  const std::shared_ptr<Slab> slab_;
  const size_t cacheBytes_;
  mutable Mutex mutex_;
  Chunks chunks_ SMDDP_GUARDED_BY(mutex_);
  std::list<uintptr_t> cached_ SMDDP_GUARDED_BY(mutex_);  // free large blocks, oldest first
  size_t cachedBytes_ SMDDP_GUARDED_BY(mutex_) = 0;
  size_t heldBytes_ SMDDP_GUARDED_BY(mutex_) = 0;
  std::vector<uint32_t> freeIndexes_ SMDDP_GUARDED_BY(mutex_);
};

// The communication memory of one mate. A segment is mapped when it is first used; then the mappings of segments that
// the mate has given up are removed. Used by the thread that owns the engine.
class MateMemory {
 public:
  explicit MateMemory(std::shared_ptr<Mate> mate) : mate_(std::move(mate)) {}

  // The address of a location, valid until the mate frees the block. Throws Transport if the mate does not have this
  // memory, or has given it up; Resource if it cannot be mapped.
  std::byte* resolve(Location location, size_t bytes);
  size_t mappings() const { return mappings_.size(); }

 private:
  void map(const Location& location);
  void dropDead();

  std::shared_ptr<Mate> mate_;
  std::unordered_map<uint32_t, std::shared_ptr<Segment>> mappings_;  // by index
};

}  // namespace smddp::transport::shm
