// Owned libfabric objects. Each closes itself. The create functions throw with the provider's error text.
//
// An object must be closed before the one from which it was made: declare members in the order of creation.
#pragma once

#include <memory>
#include <string>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "common/error.h"
#include "transport/fabric/library.h"
#include "transport/transport.h"

namespace smddp::transport::fabric {

template <typename T>
struct CloseFid {
  // If the close fails, the process keeps the object until it ends.
  void operator()(T* object) const noexcept { fi_close(&object->fid); }
};
template <typename T>
using Fid = std::unique_ptr<T, CloseFid<T>>;

using Fabric = Fid<fid_fabric>;
using Domain = Fid<fid_domain>;
using AddressVector = Fid<fid_av>;
using CompletionQueue = Fid<fid_cq>;
using EventQueue = Fid<fid_eq>;
using EndpointFid = Fid<fid_ep>;
using MemoryRegion = Fid<fid_mr>;

struct FreeInfo {
  void operator()(fi_info* info) const noexcept { library().freeInfo(info); }
};
using InfoPtr = std::unique_ptr<fi_info, FreeInfo>;

// Throws unless libfabric's `result` is a success; otherwise it is a negative fi_errno.
inline void check(ssize_t result, const char* what) {
  if (result >= 0) return;
  raise(ErrorKind::Transport, "{}: {}", what, library().describeError(static_cast<int>(-result)));
}

inline Fabric createFabric(fi_info& info) {
  fid_fabric* object = nullptr;
  check(library().openFabric(info.fabric_attr, &object, nullptr), "fi_fabric");
  return Fabric(object);
}

inline Domain createDomain(fid_fabric& fabric, fi_info& info) {
  fid_domain* object = nullptr;
  check(fi_domain(&fabric, &info, &object, nullptr), "fi_domain");
  return Domain(object);
}

inline AddressVector createAddressVector(fid_domain& domain) {
  fi_av_attr attributes{};
  attributes.type = FI_AV_TABLE;
  fid_av* object = nullptr;
  check(fi_av_open(&domain, &attributes, &object, nullptr), "fi_av_open");
  return AddressVector(object);
}

// Null if the provider refuses this size or this wait object; the caller then asks for less.
inline CompletionQueue tryCreateCompletionQueue(fid_domain& domain, size_t size, fi_wait_obj wait) {
  fi_cq_attr attributes{};
  attributes.size = size;
  attributes.format = FI_CQ_FORMAT_DATA;
  attributes.wait_obj = wait;
  fid_cq* object = nullptr;
  return fi_cq_open(&domain, &attributes, &object, nullptr) == 0 ? CompletionQueue(object)
                                                                 : nullptr;
}

// Null if the provider has none.
inline EventQueue tryCreateEventQueue(fid_fabric& fabric) {
  fi_eq_attr attributes{};
  attributes.wait_obj = FI_WAIT_NONE;
  fid_eq* object = nullptr;
  return fi_eq_open(&fabric, &attributes, &object, nullptr) == 0 ? EventQueue(object) : nullptr;
}

inline EndpointFid createEndpoint(fid_domain& domain, fi_info& info) {
  fid_ep* object = nullptr;
  check(fi_endpoint(&domain, &info, &object, nullptr), "fi_endpoint");
  return EndpointFid(object);
}

inline MemoryRegion createMemoryRegion(fid_domain& domain, void* start, size_t bytes,
                                       uint64_t access, uint64_t key) {
  fid_mr* object = nullptr;
  const int result = fi_mr_reg(&domain, start, bytes, access, 0, key, 0, &object, nullptr);
  if (result != 0)
    raise(ErrorKind::Resource,
          "the fabric cannot register {} bytes of memory: {}; `ulimit -l` is the usual limit",
          bytes, library().describeError(-result));
  return MemoryRegion(object);
}

// Registers memory of a device, as a source of our transfers.
inline MemoryRegion createDeviceRegion(fid_domain& domain, const DeviceMemory& memory,
                                       uint64_t key) {
  const iovec range{memory.bytes.data(), memory.bytes.size()};
  fi_mr_attr attributes{};
  attributes.mr_iov = &range;
  attributes.iov_count = 1;
  attributes.access = FI_WRITE | FI_SEND;
  attributes.requested_key = key;
  if (memory.kind == DeviceMemory::Kind::Cuda) {
    attributes.iface = FI_HMEM_CUDA;
    attributes.device.cuda = memory.device;
  }
  fid_mr* object = nullptr;
  const int result = fi_mr_regattr(&domain, &attributes, 0, &object);
  if (result != 0)
    raise(ErrorKind::Resource, "the fabric cannot register {} bytes of a device's memory: {}",
          memory.bytes.size(), library().describeError(-result));
  return MemoryRegion(object);
}

}  // namespace smddp::transport::fabric
