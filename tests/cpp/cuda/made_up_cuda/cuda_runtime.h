// The part of CUDA's run-time API and of its C++ keywords that csrc/cuda/kernels uses, for a made-up device: see
// made_up_cuda.h. Names, numbers and signatures are those of its documentation.
#pragma once

#include <cstddef>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

// A test of an earlier version defines it before.
#if !defined(CUDART_VERSION)
#define CUDART_VERSION 13000
#endif

enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDevice = 101,
  cudaErrorDeviceUninitialized = 201,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorNotSupported = 801,
};
typedef enum cudaError cudaError_t;
typedef struct CUstream_st* cudaStream_t;

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
  cudaDriverEntryPointVersionNotSufficent = 2,
};
constexpr unsigned long long cudaEnableDefault = 0;
constexpr unsigned int cudaIpcMemLazyEnablePeerAccess = 1;

typedef struct cudaIpcMemHandle_st {
  char reserved[64];
} cudaIpcMemHandle_t;

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaMalloc(void** devPtr, size_t size);
cudaError_t cudaFree(void* devPtr);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* devPtr);
cudaError_t cudaIpcOpenMemHandle(void** devPtr, cudaIpcMemHandle_t handle, unsigned int flags);
cudaError_t cudaIpcCloseMemHandle(void* devPtr);
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attr, int device);
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** funcPtr, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult* driverStatus = nullptr);
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** funcPtr, unsigned int cudaVersion, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult* driverStatus = nullptr);
#endif

// --- kernels ------------------------------------------------------------------------------------------------------

#define __global__
#define __grid_constant__
// It cannot be checked when a kernel is launched: tests compare the launches with the source.
#define __launch_bounds__(...)

struct uint3 {
  unsigned int x, y, z;
};
struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int ofX = 1, unsigned int ofY = 1, unsigned int ofZ = 1)
      : x(ofX), y(ofY), z(ofZ) {}
};

inline thread_local constinit dim3 gridDim;
inline thread_local constinit dim3 blockDim;
inline thread_local constinit uint3 blockIdx{};
inline thread_local constinit uint3 threadIdx{};

struct cudaLaunchAttribute;
typedef struct cudaLaunchConfig_st {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned int numAttrs;
} cudaLaunchConfig_t;

namespace made_up_cuda {
// Enqueues a grid; each of its threads runs `thread`.
cudaError_t launch(const cudaLaunchConfig_t& config, std::function<void()> thread);
}  // namespace made_up_cuda

// The arguments are copied now, the kernel runs later, as on a GPU.
template <typename... ExpTypes, typename... ActTypes>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(ExpTypes...),
                               ActTypes&&... args) {
  static_assert((std::is_trivially_copyable_v<ExpTypes> && ...));
  static_assert((sizeof(ExpTypes) + ... + 0) <= 4096, "more than a kernel takes");
  return made_up_cuda::launch(
      *config, [kernel, copies = std::tuple<ExpTypes...>(std::forward<ActTypes>(args)...)] {
        std::apply(kernel, copies);
      });
}
