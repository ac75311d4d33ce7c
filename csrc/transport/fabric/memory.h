// Memory that is registered with the fabric: targets of remote writes, and sources of our own transfers.
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

// The registered regions of one domain, by the rules of its mr_mode.
//
// Owns the registrations, but not the memory, which must stay mapped until the registry is destroyed. Used by the
// thread that owns the endpoint. A failed registration throws and leaves the others as they were.
class Registry {
 public:
  // `endpoint` may be null if mrMode does not bind registrations to it (FI_MR_ENDPOINT).
  // If `remote` is false, peers do not write to our memory directly; regions are then only keys with bounds.
  // Whoever has the key of a region can write to it. If the provider lets us choose keys, they count from `firstKey`.
  Registry(fid_domain& domain, fid_ep* endpoint, int mrMode, bool remote, uint64_t firstKey = 1);

  // Makes memory a target of puts. The same memory gets the same key again.
  RemoteKey add(std::span<std::byte> memory);

  // The provider's descriptor of our memory; null if the provider needs none. nullopt if it needs a registration and
  // the bytes are not registered.
  std::optional<void*> descriptorOf(Bytes memory) const;
  bool needsLocal() const { return (mrMode_ & FI_MR_LOCAL) != 0; }

  // Registers memory of a device for our own transfers. It must not overlap other such memory. Throws Resource.
  void addDevice(const DeviceMemory& memory);
  void removeDevice(std::span<std::byte> memory);
  // Throws Internal if the memory is not registered.
  void* deviceDescriptorOf(Bytes memory) const;

  // Registers memory for our own transfers, unless it is registered already. False if the provider needs no
  // registration.
  bool addLocal(std::span<std::byte> memory);

  // The address of the bytes [offset, offset + size) of the region that a peer named; null unless all of them lie in
  // one of our regions.
  std::byte* translate(const RemoteKey& key, uint64_t offset, uint64_t size) const;

 private:
  struct Region {
    std::span<std::byte> memory;
    MemoryRegion registration;  // null if none is needed
    RemoteKey key;
    bool target;
  };
  Region& insert(std::span<std::byte> memory, uint64_t access, bool target);
  void enable(fid_mr& registration) const;

  fid_domain& domain_;
  fid_ep* endpoint_;
  int mrMode_;
  bool remote_;
  uint64_t nextKey_;
  std::multimap<const std::byte*, Region> regions_;  // by first byte
  std::multimap<uint64_t, const Region*> targets_;   // those that are targets, by RemoteKey::key
  size_t longest_ = 0;                               // the bytes of the longest region
  struct OnDevice {
    size_t bytes;
    MemoryRegion registration;
  };
  std::map<const std::byte*, OnDevice> onDevices_;  // by first byte
};

// Memory in whole pages, so that nothing else lies in them: a forked child may not have registered pages.
struct FreePages {
  void operator()(std::byte* pages) const noexcept { std::free(pages); }
};
using Pages = std::unique_ptr<std::byte[], FreePages>;
Pages allocatePages(size_t bytes);

// Registered buffers for data that the provider cannot send in place.
//
// A buffer returns to the pool when its handle is destroyed. The pool keeps it registered for reuse.
class BouncePool {
 public:
  explicit BouncePool(Registry& registry) : registry_(registry) {}

  struct Return {
    BouncePool* pool = nullptr;
    size_t bytes = 0;
    void operator()(std::byte* buffer) const noexcept;
  };
  using Buffer = std::unique_ptr<std::byte[], Return>;

  // Null if too much is lent out. Always succeeds if nothing is lent out.
  Buffer take(size_t bytes);

 private:
  static constexpr size_t kMaxLentBytes = 64u << 20;

  Registry& registry_;
  std::vector<Pages> buffers_;
  std::multimap<size_t, std::byte*> free_;  // by capacity
  size_t lentBytes_ = 0;
};

}  // namespace smddp::transport::fabric
