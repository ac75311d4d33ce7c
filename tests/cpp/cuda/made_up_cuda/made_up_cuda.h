// Two GPUs made of host memory, on which the CUDA part runs as it is compiled for real ones: csrc/cuda/kernels/*.cu
// with <cuda.h> and <cuda_runtime.h> of this folder. This header is what tests set, and what they can look at.
//
// A stream is a queue of tasks that run only in finish(): so what is enqueued has not been done. A kernel runs its
// threads one after the other, in another order each time. Each thread of the host has a stack of contexts, as with the
// driver. Calls of the run-time library work in the topmost, or make device 0's current if there is none, and remember
// their last error per thread. What is undefined in CUDA is an error here. Any thread may call all functions.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cuda.h"
#include "cuda_runtime.h"

namespace made_up_cuda {

inline constexpr int kDevices = 2;

// A call of the run-time library, or of a function of the driver that works in a context: the context that was current.
struct Call {
  std::string function;
  CUcontext context;
};
struct Launch {
  dim3 grid, block;
  cudaStream_t stream;
};

// Clears all settings, records, tasks and memory, and this thread's contexts and last error. Primary contexts that were
// retained stay so.
void reset();

// --- settings -----------------------------------------------------------------------------------------------------

void setProcessors(int count);                          // of every device; 1 unless told otherwise
void failNext(const std::string& function, int error);  // the next call of it, once
void failAlways(const std::string& function, int error);
void hide(const std::string& driverFunction);  // an older driver, which has no such function
void refuseToShare(void* memory);              // as memory of a virtual address range is

// Memory of another process: the name that this process would get, and the address here once it is opened.
struct Exported {
  cudaIpcMemHandle_t handle;
  void* base;
};
Exported exportElsewhere(int device, size_t bytes);
int timesOpen(const void* base);

// --- what happened ------------------------------------------------------------------------------------------------

std::vector<Call> takeCalls();
std::vector<Launch> takeLaunches();
int timesRetained(int device);

// --- contexts of the calling thread -------------------------------------------------------------------------------

std::vector<CUcontext>& contexts();  // the current one is the last
CUcontext primaryContext(int device);
CUcontext otherContext(int device);  // one that somebody has created, not the primary
cudaError_t lastError();             // does not clear it

// --- streams ------------------------------------------------------------------------------------------------------

cudaStream_t newStream(int device);
cudaStream_t defaultStream(int device);  // what null means in one of its contexts
size_t pending(cudaStream_t stream);
void finish(cudaStream_t stream);  // on the calling thread; one thread at a time

}  // namespace made_up_cuda
