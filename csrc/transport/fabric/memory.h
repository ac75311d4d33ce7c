// Memory that the fabric knows: targets of remote writes, and the sources of our own transfers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "transport/fabric/fid.h"
#include "transport/transport.h"

namespace smddp::transport::fabric {

// Registered regions of one domain, under the rules of its mr_mode.
//
// Owns the registrations, not the memory, which must stay mapped until the registry is gone. Used by the one
// thread that owns the endpoint. A failed registration throws and leaves the others as they were.
class Registry {
 public:
  // `endpoint` may be null while mrMode does not bind registrations to it (FI_MR_ENDPOINT).
  // With `remote` false nobody writes to us directly: regions are then only names with bounds.
  Registry(fid_domain& domain, fid_ep* endpoint, int mrMode, bool remote);

  // Makes memory a target of puts. The same memory gets the same key again.
  RemoteKey add(std::span<std::byte> memory);

  // What the provider wants to be told about our own memory: null where it wants nothing. Nothing at all when it wants
  // a registration and the bytes lie in none.
  std::optional<void*> descriptorOf(Bytes memory) const;
  bool needsLocal() const { return (mrMode_ & FI_MR_LOCAL) != 0; }

  // Memory of a device, for our own transfers; it overlaps none that is there. Throws Resource.
  void addDevice(const DeviceMemory& memory);
  void removeDevice(std::span<std::byte> memory);
  // Throws Internal where it lies in none.
  void* deviceDescriptorOf(Bytes memory) const;

  // Registers memory for our own transfers unless that is done, or not needed at all (false).
  bool addLocal(std::span<std::byte> memory);

  // The bytes [offset, offset + size) of the region that a peer named; empty pointer when no region of ours
  // holds all of them. A peer's word is not trusted.
  std::byte* translate(const RemoteKey& key, uint64_t offset, uint64_t size) const;

 private:
  struct Region {
    std::span<std::byte> memory;
    MemoryRegion registration;  // null where none is needed
    RemoteKey key;
    bool target;
  };
  Region& insert(std::span<std::byte> memory, uint64_t access, bool target);
  void enable(fid_mr& registration) const;

  fid_domain& domain_;
  fid_ep* endpoint_;
  int mrMode_;
  bool remote_;
  uint64_t nextKey_ = 1;
  std::multimap<const std::byte*, Region> regions_;  // by first byte
  size_t longest_ = 0;                               // bytes of a region
  struct OnDevice {
    size_t bytes;
    MemoryRegion registration;
  };
  std::map<const std::byte*, OnDevice> onDevices_;  // by first byte
};

// Whole pages, so that nothing else shares them: registered ones may be missing in a forked child.
struct FreePages {
  void operator()(std::byte* pages) const noexcept { std::free(pages); }
};
using Pages = std::unique_ptr<std::byte[], FreePages>;
Pages allocatePages(size_t bytes);

// Buffers for what the provider cannot take from where it lies.
//
// A buffer goes back to the pool when its handle is destroyed; the pool keeps it, registered, for the next one.
class BouncePool {
 public:
  explicit BouncePool(Registry& registry) : registry_(registry) {}

  struct Return {
    BouncePool* pool = nullptr;
    size_t bytes = 0;
    void operator()(std::byte* buffer) const noexcept;
  };
  using Buffer = std::unique_ptr<std::byte[], Return>;

  // Null when too much is lent out already; always succeeds when nothing is.
  Buffer take(size_t bytes);

 private:
  static constexpr size_t kMaxLentBytes = 64u << 20;

  Registry& registry_;
  std::vector<Pages> buffers_;
  std::multimap<size_t, std::byte*> free_;  // by capacity
  size_t lentBytes_ = 0;
};

}  // namespace smddp::transport::fabric
