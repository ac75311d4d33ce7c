#include "transport/shm/slab.h"

#include <sys/resource.h>

#include <algorithm>
#include <new>

#include "common/error.h"
#include "common/log.h"

namespace smddp::transport::shm {
namespace {

constexpr size_t kPageBytes = roundUp(sizeof(ProcessPage), Segment::kPage);

}  // namespace

std::shared_ptr<Slab> Slab::create(size_t reserve) {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    reserve = std::min(reserve, kReserveOfLimited);
  }
  for (size_t bytes = reserve;; bytes /= 2) {
    try {
      return std::make_shared<Slab>(Segment::create(bytes, "smddp-slab"));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::Resource || bytes / 2 < kLeastReserve) throw;
      SMDDP_LOG(Info, "transport/shm", "a slab of {} bytes was refused, trying half of it: {}",
                bytes, error.what());
    }
  }
}

Slab::Slab(std::shared_ptr<Segment> segment)
    : segment_(std::move(segment)), regions_(kPageBytes, segment_->size()) {
  segment_->commit(0, kPageBytes);
  new (segment_->data()) ProcessPage(segment_->address().nonce);
}

Slab::~Slab() { page().leave("its process group was destroyed"); }

std::span<std::byte> Slab::allocate(size_t bytes, size_t align) {
  const uint64_t rounded = roundUp(std::max<size_t>(bytes, 1), Segment::kPage);
  const MutexLock lock(mutex_);
  const auto offset = regions_.allocate(rounded, std::max(align, Segment::kPage));
  if (!offset) {
    raise(ErrorKind::Resource,
          "no room for {} bytes in this process's shared memory ({} of {} bytes are used); lower "
          "SMDDP_POOL_BYTES or SMDDP_IN_FLIGHT, destroy unused groups, or raise ulimit -v",
          bytes, regions_.used(), regions_.total());
  }
  return {data() + *offset, bytes};
}

Slab::Range Slab::pagesOf(std::span<std::byte> memory) const {
  const uint64_t offset = offsetOf(memory.data());
  return {offset, offset + roundUp(std::max<size_t>(memory.size(), 1), Segment::kPage)};
}

void Slab::free(std::span<std::byte> memory) {
  const auto [begin, end] = pagesOf(memory);
  const MutexLock lock(mutex_);
  if (keeps(Range{begin, end})) return;
  // Discard first: after the next line the pages may be allocated again.
  segment_->discard(begin, end - begin);
  regions_.free(begin, end - begin);
}

void Slab::discard(std::span<std::byte> memory) {
  auto [begin, end] = pagesOf(memory);
  const MutexLock lock(mutex_);
  for (const auto& [keptBegin, keptEnd] : kept_) {
    if (keptEnd <= begin) continue;
    if (keptBegin >= end) break;
    if (keptBegin > begin) segment_->discard(begin, keptBegin - begin);
    begin = keptEnd;
  }
  if (begin < end) segment_->discard(begin, end - begin);
}

void Slab::keep(std::span<std::byte> memory) {
  auto [begin, end] = pagesOf(memory);
  begin -= begin % Segment::kPage;
  const MutexLock lock(mutex_);
  auto it = kept_.upper_bound(begin);
  if (it != kept_.begin() && std::prev(it)->second >= begin) --it;
  while (it != kept_.end() && it->first <= end) {
    begin = std::min(begin, it->first);
    end = std::max(end, it->second);
    it = kept_.erase(it);
  }
  kept_[begin] = end;
}

bool Slab::keeps(std::span<std::byte> memory) const {
  const MutexLock lock(mutex_);
  return keeps(pagesOf(memory));
}

bool Slab::keeps(const Range& range) const {
  const auto after = kept_.lower_bound(range.second);
  return after != kept_.begin() && std::prev(after)->second > range.first;
}

void Slab::commit(std::span<std::byte> memory) {
  segment_->commit(offsetOf(memory.data()), memory.size());
}

uint64_t Slab::offsetOf(const void* pointer) const {
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  const auto begin = reinterpret_cast<uintptr_t>(data());
  SMDDP_CHECK(at >= begin && at - begin <= size(), "{} is not in the slab", pointer);
  return at - begin;
}

std::shared_ptr<Mate> Mate::attach(const SegmentAddress& address) {
  auto mate = std::make_shared<Mate>(Segment::attach(address));
  const ProcessPage& page = mate->page();
  if (mate->size() < kPageBytes || page.magic != ProcessPage::kMagic ||
      page.version != ProcessPage::kVersion) {
    raise(ErrorKind::Transport,
          "process {} uses another layout of shared memory than this one; install the same version "
          "of "
          "smddp for all ranks",
          address.pid);
  }
  return mate;
}

}  // namespace smddp::transport::shm
