#include "transport/fabric/memory.h"

#include <algorithm>
#include <bit>
#include <new>

#include "common/error.h"

namespace smddp::transport::fabric {

Registry::Registry(fid_domain& domain, fid_ep* endpoint, int mrMode, bool remote, uint64_t firstKey)
    : domain_(domain), endpoint_(endpoint), mrMode_(mrMode), remote_(remote), nextKey_(firstKey) {}

RemoteKey Registry::add(std::span<std::byte> memory) {
  if (memory.empty()) raise(ErrorKind::Usage, "an empty range cannot be a target of puts");
  const auto [first, last] = regions_.equal_range(memory.data());
  for (auto it = first; it != last; ++it) {
    if (it->second.target && it->second.memory.size() == memory.size()) return it->second.key;
  }
  // Register it also as a source: received data in slots is often sent on.
  return insert(memory, FI_REMOTE_WRITE | FI_WRITE | FI_SEND | FI_RECV, true).key;
}

bool Registry::addLocal(std::span<std::byte> memory) {
  if (!needsLocal()) return false;
  if (!descriptorOf(memory)) insert(memory, FI_WRITE | FI_SEND | FI_RECV, false);
  return true;
}

Registry::Region& Registry::insert(std::span<std::byte> memory, uint64_t access, bool target) {
  Region region{memory, nullptr, {}, target};
  region.key = {0, nextKey_++};
  if ((target && remote_) || needsLocal()) {
    region.registration =
        createMemoryRegion(domain_, memory.data(), memory.size(), access, region.key.key);
    enable(*region.registration);
  }
  if (remote_ && region.registration) {
    region.key.key = fi_mr_key(region.registration.get());
    if (mrMode_ & FI_MR_VIRT_ADDR) region.key.address = reinterpret_cast<uint64_t>(memory.data());
  }
  longest_ = std::max(longest_, memory.size());
  Region& added = regions_.emplace(memory.data(), std::move(region))->second;
  if (target) targets_.emplace(added.key.key, &added);
  return added;
}

void Registry::enable(fid_mr& registration) const {
  if ((mrMode_ & FI_MR_ENDPOINT) == 0) return;
  check(fi_mr_bind(&registration, &endpoint_->fid, 0), "fi_mr_bind");
  check(fi_mr_enable(&registration), "fi_mr_enable");
}

void Registry::addDevice(const DeviceMemory& memory) {
  MemoryRegion registration = createDeviceRegion(domain_, memory, nextKey_++);
  enable(*registration);
  onDevices_.insert_or_assign(memory.bytes.data(),
                              OnDevice{memory.bytes.size(), std::move(registration)});
}

void Registry::removeDevice(std::span<std::byte> memory) { onDevices_.erase(memory.data()); }

void* Registry::deviceDescriptorOf(Bytes memory) const {
  const auto after = onDevices_.upper_bound(memory.data());
  if (after != onDevices_.begin()) {
    const auto& [begin, region] = *std::prev(after);
    if (memory.data() + memory.size() <= begin + region.bytes)
      return fi_mr_desc(region.registration.get());
  }
  raise(ErrorKind::Internal, "a put from memory of a device that is not registered");
}

std::optional<void*> Registry::descriptorOf(Bytes memory) const {
  if (!needsLocal()) return nullptr;
  // Regions may overlap. So try all that begin before the first byte, up to the length of the longest one. The nearest
  // one nearly always fits.
  auto it = regions_.upper_bound(memory.data());
  while (it != regions_.begin()) {
    --it;
    const auto region = it->second.memory;
    if (static_cast<size_t>(memory.data() - region.data()) >= longest_) break;
    if (memory.data() + memory.size() <= region.data() + region.size())
      return fi_mr_desc(it->second.registration.get());
  }
  return std::nullopt;
}

std::byte* Registry::translate(const RemoteKey& key, uint64_t offset, uint64_t size) const {
  const auto [first, last] = targets_.equal_range(key.key);
  for (auto it = first; it != last; ++it) {
    const Region& region = *it->second;
    if (region.key.address != key.address) continue;
    const uint64_t total = region.memory.size();
    // No sum, which could overflow.
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
    // The pool owns the buffer until the end, but does not lend it again.
  }
}

}  // namespace smddp::transport::fabric
