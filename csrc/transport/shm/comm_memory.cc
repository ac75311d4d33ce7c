#include "transport/shm/comm_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "common/error.h"

namespace smddp::transport::shm {
namespace {

// The tag that announces a segment in the control page. It is never 0, which means no segment.
uint64_t tagOf(const Nonce& nonce) {
  uint64_t tag = 0;
  std::memcpy(&tag, nonce.data(), sizeof tag);
  return tag | 1;
}

}  // namespace

CommMemory::CommMemory(std::shared_ptr<Slab> slab, size_t cacheBytes)
    : slab_(std::move(slab)), cacheBytes_(cacheBytes) {
  // Try all indexes of the table, low ones first. announce() claims one; other CommMemory objects may have claimed it.
  for (uint32_t i = ProcessPage::kMaxCommSegments; i-- > 0;) freeIndexes_.push_back(i);
}

CommMemory::~CommMemory() {
  if (slab_->page().pid != getpid()) return;
  std::vector<Chunk> chunks;
  for (auto& [begin, chunk] : chunks_) chunks.push_back(std::move(chunk));
  release(chunks);
}

void* CommMemory::allocate(size_t bytes) {
  if (slab_->page().pid != getpid()) {
    raise(ErrorKind::Resource, "communication memory is not available in a forked process");
  }
  return bytes >= kLargeBytes ? allocateLarge(bytes) : allocateSmall(bytes);
}

void* CommMemory::allocateLarge(size_t bytes) {
  const size_t rounded = roundUp(bytes, kLargeGranule);
  {
    const MutexLock lock(mutex_);
    if (void* block = takeCached(rounded)) return block;
  }
  // Without the lock, because backing the memory takes about 1 ms per MiB.
  auto segment = makeSegment(rounded);
  const MutexLock lock(mutex_);
  Chunk& chunk = announce(std::move(segment));
  chunk.blocks[0] = rounded;
  return chunk.segment->data();
}

void* CommMemory::allocateSmall(size_t bytes) {
  const size_t rounded = roundUp(std::max<size_t>(bytes, 1), kAlignment);
  {
    const MutexLock lock(mutex_);
    if (void* block = takeFromArena(rounded)) return block;
  }
  auto segment = makeSegment(kArenaBytes);
  const MutexLock lock(mutex_);
  announce(std::move(segment)).arena.emplace(0, kArenaBytes);
  return takeFromArena(rounded);
}

// Takes the smallest cached block that is large enough and wastes at most a quarter.
void* CommMemory::takeCached(size_t bytes) {
  auto best = cached_.end();
  size_t bestSize = bytes + bytes / 4 + 1;
  for (auto it = cached_.begin(); it != cached_.end(); ++it) {
    const size_t size = chunks_.at(*it).segment->size();
    if (size < bytes || size >= bestSize) continue;
    best = it;
    bestSize = size;
  }
  if (best == cached_.end()) return nullptr;
  Chunk& chunk = chunks_.at(*best);
  chunk.blocks[0] = bestSize;
  cachedBytes_ -= bestSize;
  cached_.erase(best);
  return chunk.segment->data();
}

void* CommMemory::takeFromArena(size_t bytes) {
  for (auto& [begin, chunk] : chunks_) {
    if (!chunk.arena) continue;
    if (const auto offset = chunk.arena->allocate(bytes, kAlignment)) {
      chunk.blocks[*offset] = bytes;
      return chunk.segment->data() + *offset;
    }
  }
  return nullptr;
}

std::shared_ptr<Segment> CommMemory::makeSegment(size_t bytes) {
  const auto make = [bytes] {
    auto segment = Segment::create(bytes, "smddp-tensors");
    segment->commit(0, bytes);
    return segment;
  };
  try {
    return make();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::Resource) throw;
  }
  // Memory is short: free the cache and try again.
  MutexLock lock(mutex_);
  auto dropped = trimCache(0);
  lock.unlock();
  release(dropped);
  return make();
}

CommMemory::Chunk& CommMemory::announce(std::shared_ptr<Segment> segment) {
  auto& table = slab_->page().commSegments;
  const uint64_t tag = tagOf(segment->address().nonce);
  while (!freeIndexes_.empty()) {
    const uint32_t index = freeIndexes_.back();
    freeIndexes_.pop_back();
    uint64_t expected = 0;
    if (!table[index].compare_exchange_strong(expected, tag, std::memory_order_release)) continue;
    heldBytes_ += segment->size();
    const auto begin = reinterpret_cast<uintptr_t>(segment->data());
    return chunks_[begin] = Chunk{std::move(segment), index, std::nullopt, {}};
  }
  raise(ErrorKind::Resource, "more than {} pieces of communication memory are in use",
        table.size());
}

void CommMemory::free(void* block) {
  if (slab_->page().pid != getpid()) return;
  MutexLock lock(mutex_);
  const auto found = chunkOf(block);
  SMDDP_CHECK(found != chunks_.end(), "{} is not communication memory", block);
  Chunk& chunk = found->second;
  const auto entry = chunk.blocks.find(reinterpret_cast<uintptr_t>(block) - found->first);
  SMDDP_CHECK(entry != chunk.blocks.end(), "{} is not a block of communication memory in use",
              block);
  if (chunk.arena) chunk.arena->free(entry->first, entry->second);
  chunk.blocks.erase(entry);
  // An empty arena may stay, too, but is not in cached_: takeFromArena() finds it in chunks_.
  if (!chunk.arena) {
    cached_.push_back(found->first);
    cachedBytes_ += chunk.segment->size();
  }
  auto dropped = trimCache(cacheBytes_);
  lock.unlock();
  release(dropped);
}

std::optional<Location> CommMemory::locate(const void* pointer, size_t bytes) const {
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  const MutexLock lock(mutex_);
  auto it = chunks_.upper_bound(at);
  if (it == chunks_.begin()) return std::nullopt;
  const auto& [begin, chunk] = *--it;
  const uint64_t offset = at - begin;
  auto block = chunk.blocks.upper_bound(offset);
  if (block == chunk.blocks.begin()) return std::nullopt;
  --block;
  const uint64_t end = block->first + block->second;
  if (offset > end || bytes > end - offset) return std::nullopt;
  return Location{chunk.segment->address(), offset, chunk.index, 0};
}

size_t CommMemory::heldBytes() const {
  const MutexLock lock(mutex_);
  return heldBytes_;
}

CommMemory::Chunks::iterator CommMemory::chunkOf(const void* pointer) {
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  const auto it = chunks_.upper_bound(at);
  if (it == chunks_.begin()) return chunks_.end();
  const auto chunk = std::prev(it);
  return at - chunk->first < chunk->second.segment->size() ? chunk : chunks_.end();
}

// Takes a chunk out; release() gives it back. Returns the next one.
CommMemory::Chunks::iterator CommMemory::drop(Chunks::iterator chunk, std::vector<Chunk>& dropped) {
  heldBytes_ -= chunk->second.segment->size();
  dropped.push_back(std::move(chunk->second));
  return chunks_.erase(chunk);
}

// Takes the oldest free blocks out until `limit` is kept, and all empty arenas except one (none for
// limit 0).
std::vector<CommMemory::Chunk> CommMemory::trimCache(size_t limit) {
  std::vector<Chunk> dropped;
  while (cachedBytes_ > limit) {
    const auto it = chunks_.find(cached_.front());
    cached_.pop_front();
    cachedBytes_ -= it->second.segment->size();
    drop(it, dropped);
  }
  bool keepOne = limit >= kArenaBytes;
  for (auto it = chunks_.begin(); it != chunks_.end();) {
    const bool empty = it->second.arena && it->second.blocks.empty();
    it = empty && !keepOne ? drop(it, dropped) : std::next(it);
    if (empty) keepOne = false;
  }
  return dropped;
}

// Called without the lock, because unmapping is slow. An index is free again only after the table entry is cleared, so
// that mates see that the segment is gone.
void CommMemory::release(const std::vector<Chunk>& chunks) {
  for (const Chunk& chunk : chunks) {
    slab_->page().commSegments[chunk.index].store(0, std::memory_order_release);
    // Return the memory to the system now, even if mates still have it mapped.
    chunk.segment->discard(0, chunk.segment->size());
    const MutexLock lock(mutex_);
    freeIndexes_.push_back(chunk.index);
  }
}

std::byte* MateMemory::resolve(Location location, size_t bytes) {
  const SegmentAddress& address = location.segment;
  if (location.offset > address.bytes || bytes > address.bytes - location.offset) {
    raise(ErrorKind::Transport, "process {} named {} bytes at {} of a segment of {} bytes",
          address.pid, bytes, location.offset, address.bytes);
  }
  const auto& table = mate_->page().commSegments;
  if (location.index >= table.size() || address.pid != mate_->address().pid ||
      table[location.index].load(std::memory_order_acquire) != tagOf(address.nonce)) {
    raise(ErrorKind::Transport,
          "process {} named communication memory that it does not have; a tensor was freed while a "
          "collective still used it",
          mate_->address().pid);
  }
  const auto known = mappings_.find(location.index);
  if (known == mappings_.end() || known->second->address().nonce != address.nonce) map(location);
  const auto& segment = mappings_.at(location.index);
  // The mapping was found by its nonce only, so check the size, too.
  if (segment->size() != address.bytes) {
    raise(ErrorKind::Transport, "process {} named a segment of {} bytes that has {}", address.pid,
          address.bytes, segment->size());
  }
  return segment->data() + location.offset;
}

void MateMemory::map(const Location& location) {
  dropDead();
  auto segment = Segment::attach(location.segment);
  segment->populate();
  mappings_[location.index] = std::move(segment);
}

void MateMemory::dropDead() {
  const auto& table = mate_->page().commSegments;
  std::erase_if(mappings_, [&](const auto& entry) {
    const auto& [index, segment] = entry;
    return table[index].load(std::memory_order_acquire) != tagOf(segment->address().nonce);
  });
}

}  // namespace smddp::transport::shm
