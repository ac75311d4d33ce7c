// The functions of DeviceTable. They use the CUDA run-time library, which is linked into this one; torch may bring
// another one. Both work in the device's primary context, and so can use the same pointers and streams.
#include <cuda.h>

#include <cstring>
#include <map>
#include <mutex>

#include "cuda/device_table.h"
#include "cuda/kernels/launch.cuh"

namespace smddp::cuda {
namespace {

// A function of the driver, which is not linked; null where the driver does not have it.
template <typename Function>
void find(const char* name, Function& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const auto error =
      cudaGetDriverEntryPointByVersion(name, &found, 11000, cudaEnableDefault, &status);
#else
  const auto error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &status);
#endif
  const bool isThere = error == cudaSuccess && status == cudaDriverEntryPointSuccess;
  function = isThere ? reinterpret_cast<Function>(found) : nullptr;
  if (error != cudaSuccess) cudaGetLastError();
}

// Functions of the driver that the run-time library does not have.
struct Driver {
  CUresult (*retain)(CUcontext*, CUdevice);
  CUresult (*push)(CUcontext);
  CUresult (*pop)(CUcontext*);
  CUresult (*rangeOf)(CUdeviceptr*, size_t*, CUdeviceptr);
  CUresult (*attributeOf)(void*, CUpointer_attribute, CUdeviceptr);

  Driver() {
    find("cuDevicePrimaryCtxRetain", retain);
    find("cuCtxPushCurrent", push);
    find("cuCtxPopCurrent", pop);
    find("cuMemGetAddressRange", rangeOf);
    find("cuPointerGetAttribute", attributeOf);
  }
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }
};

// Makes a device's primary context the thread's current one, for the scope. It uses the driver: torch's run-time
// library and this one each have a current device of their own, but both follow the driver's current context.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    const Driver& driver = Driver::get();
    // A context that could not be left again is not entered.
    if (driver.retain == nullptr || driver.push == nullptr || driver.pop == nullptr) {
      error_ = cudaErrorInsufficientDriver;
      return;
    }
    // The context is never released; torch keeps it, too. The run-time library has the driver's device numbers.
    CUcontext context = nullptr;
    const std::lock_guard lock(mutex());
    const auto known = contexts().find(device);
    if (known != contexts().end()) {
      context = known->second;
    } else if (driver.retain(&context, device) == CUDA_SUCCESS) {
      contexts().emplace(device, context);
    } else {
      error_ = cudaErrorInvalidDevice;
      return;
    }
    pushed_ = driver.push(context) == CUDA_SUCCESS;
    if (!pushed_) error_ = cudaErrorInvalidDevice;
  }
  ~DeviceScope() {
    CUcontext ours = nullptr;
    if (pushed_) Driver::get().pop(&ours);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  cudaError_t error() const { return error_; }

 private:
  static std::mutex& mutex() {
    static auto* const it = new std::mutex;
    return *it;
  }
  static std::map<int, CUcontext>& contexts() {
    static auto* const all = new std::map<int, CUcontext>;
    return *all;
  }

  bool pushed_ = false;
  cudaError_t error_ = cudaSuccess;
};

template <typename Action>
int onDevice(int device, const Action& action) {
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  const cudaError_t error = action();
  // Clears the error of this call, which a later call would return.
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// Handles that were made before, since the driver is slow to make one. An allocation's number is never used again, so
// an entry of freed memory is never found.
struct KnownHandles {
  std::mutex mutex;
  std::map<uint64_t, cudaIpcMemHandle_t> byAllocation;
};
constexpr size_t kMostHandles = 1024;

KnownHandles& knownHandles() {
  static auto* all = new KnownHandles;
  return *all;
}

cudaError_t handleOf(const MemoryName& name, cudaIpcMemHandle_t* handle) {
  KnownHandles& known = knownHandles();
  const std::lock_guard lock(known.mutex);
  if (const auto found = known.byAllocation.find(name.allocation);
      found != known.byAllocation.end()) {
    *handle = found->second;
    return cudaSuccess;
  }
  const auto error = cudaIpcGetMemHandle(handle, reinterpret_cast<void*>(name.base));
  if (error != cudaSuccess) return error;
  if (known.byAllocation.size() >= kMostHandles) known.byAllocation.clear();
  known.byAllocation.emplace(name.allocation, *handle);
  return cudaSuccess;
}

cudaError_t findRange(const void* data, MemoryRange* range) {
  const Driver& driver = Driver::get();
  if (driver.rangeOf == nullptr || driver.attributeOf == nullptr) return cudaErrorNotSupported;
  const auto address = reinterpret_cast<CUdeviceptr>(data);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  unsigned long long allocation = 0;
  // For a range of virtual addresses, or a pool, the driver describes only a part of the memory.
  int isAllocation = 0;
  if (driver.rangeOf(&base, &bytes, address) != CUDA_SUCCESS ||
      driver.attributeOf(&allocation, CU_POINTER_ATTRIBUTE_BUFFER_ID, base) != CUDA_SUCCESS ||
      driver.attributeOf(&isAllocation, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, base) !=
          CUDA_SUCCESS) {
    return cudaErrorInvalidValue;
  }
  if (isAllocation == 0) return cudaErrorNotSupported;
  *range = {base, bytes, allocation};
  return cudaSuccess;
}

cudaError_t nameMemory(const void* data, MemoryName* name) {
  MemoryRange range;
  if (const auto error = findRange(data, &range); error != cudaSuccess) return error;
  name->base = range.base;
  name->offset = reinterpret_cast<uint64_t>(data) - range.base;
  name->allocation = range.allocation;
  cudaIpcMemHandle_t handle;
  static_assert(sizeof handle == sizeof name->handle);
  const auto error = handleOf(*name, &handle);
  if (error == cudaSuccess) std::memcpy(name->handle, &handle, sizeof handle);
  return error;
}

cudaError_t openMemory(const uint8_t* from, void** base) {
  cudaIpcMemHandle_t handle;
  std::memcpy(&handle, from, sizeof handle);
  return cudaIpcOpenMemHandle(base, handle, cudaIpcMemLazyEnablePeerAccess);
}

cudaError_t runJob(int device, const Job& given, cudaStream_t stream) {
  if (given.count == 0 || given.numDsts == 0) return cudaSuccess;
  if (given.numSrcs < 1 || given.numSrcs > kMaxSharing || given.numDsts < 1 ||
      given.numDsts > kMaxSharing || sizeOf(given.type) == 0) {
    return cudaErrorInvalidValue;
  }
  const Job job = normalised(given);
  const bool isCopy = job.numSrcs == 1 && !job.pre && !job.post;
  if (isCopy && job.numDsts == 1) {
    // Source and destination of a copy must not overlap, and here they are the same.
    if (job.dsts[0] == job.srcs[0]) return cudaSuccess;
    return cudaMemcpyAsync(job.dsts[0], job.srcs[0], job.count * sizeOf(job.type),
                           cudaMemcpyDeviceToDevice, stream);
  }
  int processors = 0;
  auto error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  // Four blocks are a multiprocessor's 2048 threads.
  const Launcher launcher{stream, processors * 4, &error};
  const bool known =
      isFloat(job.type) ? launchFloats(launcher, job) : launchIntegers(launcher, job);
  return known ? error : cudaErrorInvalidValue;
}

const DeviceTable kTable = {
    .version = kTableVersion,
    .bytes = sizeof(DeviceTable),
    .release = SMDDP_VERSION,
    .isCuda = true,
    .textOf = [](int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); },
    .allocate =
        [](int device, size_t bytes, void** memory) {
          return onDevice(device, [&] { return cudaMalloc(memory, bytes); });
        },
    .free = [](int device,
               void* memory) { return onDevice(device, [&] { return cudaFree(memory); }); },
    .rangeOf =
        [](int device, const void* data, MemoryRange* range) {
          return onDevice(device, [&] { return findRange(data, range); });
        },
    .nameOf =
        [](int device, const void* data, MemoryName* name) {
          return onDevice(device, [&] { return nameMemory(data, name); });
        },
    .open = [](int device, const uint8_t* handle,
               void** base) { return onDevice(device, [&] { return openMemory(handle, base); }); },
    .close =
        [](int device, void* base) {
          return onDevice(device, [&] { return cudaIpcCloseMemHandle(base); });
        },
    .run =
        [](int device, const Job* job, void* stream) {
          return onDevice(device,
                          [&] { return runJob(device, *job, static_cast<cudaStream_t>(stream)); });
        },
};

}  // namespace
}  // namespace smddp::cuda

extern "C" __attribute__((visibility("default"))) const smddp::cuda::DeviceTable*
smddp_device_table() {
  return &smddp::cuda::kTable;
}
