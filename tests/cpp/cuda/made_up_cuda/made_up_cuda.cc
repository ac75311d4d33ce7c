#include "made_up_cuda.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>

struct CUctx_st {
  int device;
};
struct CUstream_st {
  int device;
  std::deque<std::function<void()>> tasks;
};

namespace made_up_cuda {
namespace {

struct Allocation {
  size_t bytes;
  uint64_t number;
  int device;
  bool isShared = true;
};

// Inside a cudaIpcMemHandle_t.
struct Handle {
  uint64_t isForeign;
  uint64_t number;
  void* base;
};

struct World {
  std::mutex mutex;
  int processors = 1;
  std::map<std::string, int> failing;  // once
  std::map<std::string, int> broken;   // always
  std::set<std::string> hidden;
  std::map<std::byte*, Allocation> allocations;
  std::map<std::byte*, Allocation> foreign;
  std::map<const void*, int> open;
  uint64_t allocated = 0;
  std::multimap<size_t, std::byte*> spare;  // freed memory, which is used again, as by a driver
  std::vector<Call> calls;
  std::vector<Launch> launches;
  int retained[kDevices] = {};
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::mt19937_64 random{1};
};

World& world() {
  static auto* const it = new World;
  return *it;
}

CUctx_st primaries[kDevices] = {{0}, {1}};
CUctx_st others[kDevices] = {{0}, {1}};
CUstream_st defaults[kDevices] = {{0, {}}, {1, {}}};

thread_local cudaError_t last = cudaSuccess;

cudaError_t fail(cudaError_t error) { return last = error; }

// The error that a test wants this call to return, or 0. With the mutex held.
int wanted(const std::string& function) {
  World& all = world();
  if (const auto found = all.broken.find(function); found != all.broken.end()) return found->second;
  const auto found = all.failing.extract(function);
  return found ? found.mapped() : 0;
}

// Records a call. With the mutex held.
int begin(const char* function) {
  if (contexts().empty()) contexts().push_back(&primaries[0]);
  world().calls.push_back({function, contexts().back()});
  return wanted(function);
}

int currentDevice() { return contexts().back()->device; }

std::byte* reserve(size_t bytes) {
  World& all = world();
  const size_t rounded = (bytes + 255) / 256 * 256;
  if (const auto found = all.spare.extract(rounded)) return found.mapped();
  return static_cast<std::byte*>(std::aligned_alloc(256, rounded));
}

std::map<std::byte*, Allocation>::iterator allocationOf(std::map<std::byte*, Allocation>& among,
                                                        const void* data) {
  auto* const at = static_cast<std::byte*>(const_cast<void*>(data));
  auto found = among.upper_bound(at);
  if (found == among.begin()) return among.end();
  --found;
  return at < found->first + found->second.bytes ? found : among.end();
}

// Whether the address lies in memory of a device.
bool isMemory(const void* data, size_t bytes) {
  World& all = world();
  const auto* const at = static_cast<const std::byte*>(data);
  for (auto* among : {&all.allocations, &all.foreign}) {
    const auto found = allocationOf(*among, data);
    if (found == among->end()) continue;
    const bool isOpen = among == &all.allocations || all.open[found->first] > 0;
    if (isOpen && at + bytes <= found->first + found->second.bytes) return true;
  }
  return false;
}

void giveBack(std::byte* base, size_t bytes) {
  world().spare.emplace((bytes + 255) / 256 * 256, base);
}

CUstream_st* streamOf(cudaStream_t stream) {
  return stream == nullptr ? &defaults[currentDevice()] : stream;
}

void runGrid(const Launch& launch, const std::function<void()>& thread, uint64_t seed) {
  std::mt19937_64 random(seed);
  gridDim = launch.grid;
  blockDim = launch.block;
  std::vector<unsigned> blocks(gridDim.x * gridDim.y * gridDim.z);
  for (unsigned b = 0; b < blocks.size(); ++b) blocks[b] = b;
  std::shuffle(blocks.begin(), blocks.end(), random);
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  for (const unsigned b : blocks) {
    blockIdx = {b % gridDim.x, b / gridDim.x % gridDim.y, b / gridDim.x / gridDim.y};
    // Begins with a random thread, and goes on upwards or downwards.
    const auto first = static_cast<unsigned>(random() % threads);
    const bool upwards = random() % 2 == 0;
    for (unsigned i = 0; i < threads; ++i) {
      const unsigned t = (first + (upwards ? i : threads - i)) % threads;
      threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
      thread();
    }
  }
}

// --- the driver's functions ---------------------------------------------------------------------------------------

CUresult retain(CUcontext* context, CUdevice device) {
  const std::lock_guard lock(world().mutex);
  if (const int error = wanted("cuDevicePrimaryCtxRetain")) return static_cast<CUresult>(error);
  if (device < 0 || device >= kDevices) return CUDA_ERROR_INVALID_DEVICE;
  ++world().retained[device];
  *context = &primaries[device];
  return CUDA_SUCCESS;
}

CUresult push(CUcontext context) {
  const std::lock_guard lock(world().mutex);
  if (const int error = wanted("cuCtxPushCurrent")) return static_cast<CUresult>(error);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  contexts().push_back(context);
  return CUDA_SUCCESS;
}

CUresult pop(CUcontext* context) {
  if (contexts().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = contexts().back();
  contexts().pop_back();
  return CUDA_SUCCESS;
}

CUresult rangeOf(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (contexts().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (const int error = begin("cuMemGetAddressRange")) return static_cast<CUresult>(error);
  const auto found = allocationOf(all.allocations, reinterpret_cast<void*>(address));
  if (found == all.allocations.end()) return CUDA_ERROR_NOT_FOUND;
  *base = reinterpret_cast<CUdeviceptr>(found->first);
  *bytes = found->second.bytes;
  return CUDA_SUCCESS;
}

CUresult attributeOf(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (contexts().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (const int error = begin("cuPointerGetAttribute")) return static_cast<CUresult>(error);
  const auto found = allocationOf(all.allocations, reinterpret_cast<void*>(address));
  if (found == all.allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *static_cast<unsigned long long*>(value) = found->second.number;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *static_cast<int*>(value) = found->second.isShared ? 1 : 0;
      return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

// Looking for a function needs no context and makes none.
cudaError_t findFunction(const char* symbol, void** function, unsigned version,
                         cudaDriverEntryPointQueryResult* status) {
  struct Entry {
    void* function;
    unsigned since;  // the version of the interface; most functions have a second one
  };
  static const std::map<std::string, Entry> entries = {
      {"cuDevicePrimaryCtxRetain", {reinterpret_cast<void*>(&retain), 7000}},
      {"cuCtxPushCurrent", {reinterpret_cast<void*>(&push), 4000}},
      {"cuCtxPopCurrent", {reinterpret_cast<void*>(&pop), 4000}},
      {"cuMemGetAddressRange", {reinterpret_cast<void*>(&rangeOf), 3020}},
      {"cuPointerGetAttribute", {reinterpret_cast<void*>(&attributeOf), 4000}},
  };
  World& all = world();
  const std::lock_guard lock(all.mutex);
  *function = nullptr;
  if (const int error = wanted("cudaGetDriverEntryPoint")) {
    return fail(static_cast<cudaError_t>(error));
  }
  const auto found = entries.find(symbol);
  const bool isThere = found != entries.end() && !all.hidden.contains(symbol);
  *status = !isThere                        ? cudaDriverEntryPointSymbolNotFound
            : version < found->second.since ? cudaDriverEntryPointVersionNotSufficent
                                            : cudaDriverEntryPointSuccess;
  if (*status == cudaDriverEntryPointSuccess) *function = found->second.function;
  return cudaSuccess;
}

}  // namespace

// --- what tests call ----------------------------------------------------------------------------------------------

void reset() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.processors = 1;
  all.failing.clear();
  all.broken.clear();
  all.hidden.clear();
  for (auto* among : {&all.allocations, &all.foreign}) {
    for (const auto& [base, allocation] : *among) giveBack(base, allocation.bytes);
    among->clear();
  }
  all.open.clear();
  all.calls.clear();
  all.launches.clear();
  all.streams.clear();
  for (CUstream_st& stream : defaults) stream.tasks.clear();
  contexts().clear();
  last = cudaSuccess;
}

void setProcessors(int count) {
  const std::lock_guard lock(world().mutex);
  world().processors = count;
}

void failNext(const std::string& function, int error) {
  const std::lock_guard lock(world().mutex);
  world().failing[function] = error;
}

void failAlways(const std::string& function, int error) {
  const std::lock_guard lock(world().mutex);
  world().broken[function] = error;
}

void hide(const std::string& driverFunction) {
  const std::lock_guard lock(world().mutex);
  world().hidden.insert(driverFunction);
}

void refuseToShare(void* memory) {
  const std::lock_guard lock(world().mutex);
  world().allocations.at(static_cast<std::byte*>(memory)).isShared = false;
}

Exported exportElsewhere(int device, size_t bytes) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  std::byte* const base = reserve(bytes);
  all.foreign[base] = {bytes, ++all.allocated, device};
  Exported exported{{}, base};
  const Handle handle{1, all.allocated, base};
  std::memcpy(&exported.handle, &handle, sizeof handle);
  return exported;
}

int timesOpen(const void* base) {
  const std::lock_guard lock(world().mutex);
  return world().open[base];
}

std::vector<Call> takeCalls() {
  const std::lock_guard lock(world().mutex);
  return std::exchange(world().calls, {});
}

std::vector<Launch> takeLaunches() {
  const std::lock_guard lock(world().mutex);
  return std::exchange(world().launches, {});
}

int timesRetained(int device) {
  const std::lock_guard lock(world().mutex);
  return world().retained[device];
}

std::vector<CUcontext>& contexts() {
  thread_local std::vector<CUcontext> stack;
  return stack;
}

CUcontext primaryContext(int device) { return &primaries[device]; }
CUcontext otherContext(int device) { return &others[device]; }
cudaError_t lastError() { return last; }

cudaStream_t newStream(int device) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.streams.push_back(std::make_unique<CUstream_st>(CUstream_st{device, {}}));
  return all.streams.back().get();
}

cudaStream_t defaultStream(int device) { return &defaults[device]; }

size_t pending(cudaStream_t stream) {
  const std::lock_guard lock(world().mutex);
  return stream->tasks.size();
}

void finish(cudaStream_t stream) {
  for (;;) {
    std::function<void()> task;
    {
      const std::lock_guard lock(world().mutex);
      if (stream->tasks.empty()) return;
      task = std::move(stream->tasks.front());
      stream->tasks.pop_front();
    }
    task();
  }
}

cudaError_t launch(const cudaLaunchConfig_t& config, std::function<void()> thread) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = begin("cudaLaunchKernelEx")) return fail(static_cast<cudaError_t>(error));
  const auto [gx, gy, gz] = config.gridDim;
  const auto [bx, by, bz] = config.blockDim;
  if (gx < 1 || gy < 1 || gz < 1 || gx > 0x7fffffffu || gy > 0xffff || gz > 0xffff || bx < 1 ||
      by < 1 || bz < 1 || bx > 1024 || by > 1024 || bz > 64 || bx * by * bz > 1024) {
    return fail(cudaErrorInvalidConfiguration);
  }
  if (config.dynamicSmemBytes > 48 * 1024) return fail(cudaErrorInvalidValue);
  if (config.numAttrs != 0 || config.attrs != nullptr) return fail(cudaErrorNotSupported);
  CUstream_st* const stream = streamOf(config.stream);
  if (stream->device != currentDevice()) return fail(cudaErrorInvalidResourceHandle);
  const Launch made{config.gridDim, config.blockDim, stream};
  all.launches.push_back(made);
  stream->tasks.emplace_back(
      [made, thread = std::move(thread), seed = all.random()] { runGrid(made, thread, seed); });
  return cudaSuccess;
}

}  // namespace made_up_cuda

// --- the run-time library -----------------------------------------------------------------------------------------

using namespace made_up_cuda;

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorDeviceUninitialized: return "invalid device context";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorLaunchOutOfResources: return "too many resources requested for launch";
    case cudaErrorNotSupported: return "operation not supported";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }

cudaError_t cudaMalloc(void** devPtr, size_t size) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = begin("cudaMalloc")) return fail(static_cast<cudaError_t>(error));
  if (size > size_t{1} << 40) return fail(cudaErrorMemoryAllocation);
  *devPtr = nullptr;
  if (size == 0) return cudaSuccess;
  std::byte* const base = reserve(size);
  all.allocations[base] = {size, ++all.allocated, currentDevice()};
  *devPtr = base;
  return cudaSuccess;
}

// The real one waits for the device first. Here tests do.
cudaError_t cudaFree(void* devPtr) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = begin("cudaFree")) return fail(static_cast<cudaError_t>(error));
  if (devPtr == nullptr) return cudaSuccess;
  const auto found = all.allocations.find(static_cast<std::byte*>(devPtr));
  if (found == all.allocations.end()) return fail(cudaErrorInvalidValue);
  giveBack(found->first, found->second.bytes);
  all.allocations.erase(found);
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* devPtr) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = begin("cudaIpcGetMemHandle")) return fail(static_cast<cudaError_t>(error));
  const auto found = all.allocations.find(static_cast<std::byte*>(devPtr));
  if (found == all.allocations.end() || !found->second.isShared) return fail(cudaErrorInvalidValue);
  const Handle own{0, found->second.number, devPtr};
  static_assert(sizeof own <= sizeof *handle);
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &own, sizeof own);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** devPtr, cudaIpcMemHandle_t handle, unsigned int flags) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = begin("cudaIpcOpenMemHandle")) return fail(static_cast<cudaError_t>(error));
  if (flags != cudaIpcMemLazyEnablePeerAccess) return fail(cudaErrorInvalidValue);
  Handle content;
  std::memcpy(&content, &handle, sizeof content);
  // A process cannot open what is its own.
  if (content.isForeign != 1) return fail(cudaErrorDeviceUninitialized);
  const auto found = all.foreign.find(static_cast<std::byte*>(content.base));
  if (found == all.foreign.end() || found->second.number != content.number ||
      found->second.device != currentDevice()) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  ++all.open[content.base];
  *devPtr = content.base;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* devPtr) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = begin("cudaIpcCloseMemHandle"))
    return fail(static_cast<cudaError_t>(error));
  if (all.open[devPtr] == 0) return fail(cudaErrorInvalidValue);
  --all.open[devPtr];
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = begin("cudaMemcpyAsync")) return fail(static_cast<cudaError_t>(error));
  const auto* const from = static_cast<const std::byte*>(src);
  auto* const into = static_cast<std::byte*>(dst);
  // If they overlap, the result is undefined.
  if (kind != cudaMemcpyDeviceToDevice || !isMemory(src, count) || !isMemory(dst, count) ||
      (from < into + count && into < from + count)) {
    return fail(cudaErrorInvalidValue);
  }
  CUstream_st* const line = streamOf(stream);
  if (line->device != currentDevice()) return fail(cudaErrorInvalidResourceHandle);
  line->tasks.emplace_back([=] { std::memcpy(into, from, count); });
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attr, int device) {
  const std::lock_guard lock(world().mutex);
  if (const int error = begin("cudaDeviceGetAttribute")) {
    return fail(static_cast<cudaError_t>(error));
  }
  if (device < 0 || device >= kDevices) return fail(cudaErrorInvalidDevice);
  if (attr != cudaDevAttrMultiProcessorCount) return fail(cudaErrorInvalidValue);
  *value = world().processors;
  return cudaSuccess;
}

// Of the version of CUDA that the caller was compiled with.
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** funcPtr, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult* driverStatus) {
  if (flags != cudaEnableDefault) return fail(cudaErrorInvalidValue);
  return findFunction(symbol, funcPtr, 12000, driverStatus);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** funcPtr,
                                             unsigned int cudaVersion, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult* driverStatus) {
  if (flags != cudaEnableDefault) return fail(cudaErrorInvalidValue);
  return findFunction(symbol, funcPtr, cudaVersion, driverStatus);
}
