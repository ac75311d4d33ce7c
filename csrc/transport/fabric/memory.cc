#include "transport/fabric/memory.h"

#include <algorithm>
#include <bit>
#include <new>

#include "common/error.h"

namespace smddp::transport::fabric {

Registry::Registry(fid_domain& domain, fid_ep* endpoint, int mrMode, bool remote)
    : domain_(domain), endpoint_(endpoint), mrMode_(mrMode), remote_(remote) {}

RemoteKey Registry::add(std::span<std::byte> memory) {
  if (memory.empty()) raise(ErrorKind::Usage, "an empty range cannot be a target of puts");
  const auto [first, last] = regions_.equal_range(memory.data());
  for (auto it = first; it != last; ++it) {
    if (it->second.target && it->second.memory.size() == memory.size()) return it->second.key;
  }
  // Also as a source: slots of one operation are often forwarded by the next.
  return insert(memory, FI_REMOTE_WRITE | FI_WRITE | FI_SEND | FI_RECV, true).key;
}

bool Registry::addLocal(std::span<std::byte> memory) {
  if (!needsLocal()) return false;
  if (!sourceOf(memory).known) insert(memory, FI_WRITE | FI_SEND | FI_RECV, false);
  return true;
}

void Registry::addDevice(const DeviceMemory& memory) {
  Region region{memory.bytes, nullptr, {0, nextKey_++}, false, true};
  region.registration = createDeviceRegion(domain_, memory, region.key.key);
  enable(region);
  keep(std::move(region));
  ++numOnDevices_;
}

void Registry::removeDevice(std::span<std::byte> memory) {
  numOnDevices_ -= std::erase_if(regions_, [&](const auto& entry) {
    return entry.second.onDevice && entry.first == memory.data();
  });
}

Registry::Region& Registry::insert(std::span<std::byte> memory, uint64_t access, bool target) {
  Region region{memory, nullptr, {}, target};
  region.key = {0, nextKey_++};
  if ((target && remote_) || needsLocal()) {
    region.registration =
        createMemoryRegion(domain_, memory.data(), memory.size(), access, region.key.key);
    enable(region);
  }
  if (remote_ && region.registration) {
    region.key.key = fi_mr_key(region.registration.get());
    if (mrMode_ & FI_MR_VIRT_ADDR) region.key.address = reinterpret_cast<uint64_t>(memory.data());
  }
  return keep(std::move(region));
}

Registry::Region& Registry::keep(Region region) {
  longest_ = std::max(longest_, region.memory.size());
  return regions_.emplace(region.memory.data(), std::move(region))->second;
}

void Registry::enable(const Region& region) const {
  if ((mrMode_ & FI_MR_ENDPOINT) == 0) return;
  check(fi_mr_bind(region.registration.get(), &endpoint_->fid, 0), "fi_mr_bind");
  check(fi_mr_enable(region.registration.get()), "fi_mr_enable");
}

Registry::Source Registry::sourceOf(Bytes memory) const {
  if (!needsLocal() && numOnDevices_ == 0) return {};
  // Regions may overlap, so every one that begins before the first byte, and not too far before, is a candidate; the
  // nearest nearly always fits.
  auto it = regions_.upper_bound(memory.data());
  while (it != regions_.begin()) {
    --it;
    const Region& region = it->second;
    if (static_cast<size_t>(memory.data() - region.memory.data()) >= longest_) break;
    if (memory.data() + memory.size() > region.memory.data() + region.memory.size()) continue;
    // Without a need a region of the host has no registration, or one for others only.
    if (!needsLocal() && !region.onDevice) return {};
    return {fi_mr_desc(region.registration.get()), true, region.onDevice};
  }
  return {nullptr, !needsLocal(), false};
}

std::byte* Registry::translate(const RemoteKey& key, uint64_t offset, uint64_t size) const {
  for (const auto& [start, region] : regions_) {
    if (!region.target || region.key.key != key.key || region.key.address != key.address) continue;
    const uint64_t total = region.memory.size();
    // Written so that no sum can overflow.
    if (offset > total || size > total - offset) return nullptr;
    return region.memory.data() + offset;
  }
  return nullptr;
}

Pages allocatePages(size_t bytes) {
  constexpr size_t kPage = 4096;
  void* const pages = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  if (pages == nullptr) throw std::bad_alloc();
  return Pages(static_cast<std::byte*>(pages));
}

BouncePool::Buffer BouncePool::take(size_t bytes) {
  const size_t capacity = std::bit_ceil(std::max<size_t>(bytes, 4096));
  if (lentBytes_ > 0 && lentBytes_ + capacity > kMaxLentBytes) return nullptr;
  const auto it = free_.find(capacity);
  std::byte* buffer = nullptr;
  if (it != free_.end()) {
    buffer = it->second;
    free_.erase(it);
  } else {
    auto memory = allocatePages(capacity);
    buffer = memory.get();
    registry_.addLocal({buffer, capacity});
    buffers_.push_back(std::move(memory));
  }
  lentBytes_ += capacity;
  return Buffer(buffer, Return{this, capacity});
}

void BouncePool::Return::operator()(std::byte* buffer) const noexcept {
  pool->lentBytes_ -= bytes;
  try {
    pool->free_.emplace(bytes, buffer);
  } catch (const std::bad_alloc&) {
    // The buffer stays with the pool until the end and is not lent again.
  }
}

}  // namespace smddp::transport::fabric
