// The functions of the CUDA part, libsmddp_cuda.so. It is a library of its own, compiled by nvcc, that the module loads
// when it is first needed. The interface has plain types only: the library does not know torch, the module does not
// know CUDA.
//
// Streams are the driver's handles (cudaStream_t), devices its numbers. Functions return 0 or an error that textOf()
// names. All may be called from any thread and leave the thread's current device as it was.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/job.h"

namespace smddp::cuda {

// Counts the changes of this interface. The module refuses a library of another version.
inline constexpr uint32_t kTableVersion = 2;
inline constexpr const char* kTableSymbol = "smddp_device_table";

// How another process finds memory of this one. Addresses and handles are used again after memory was freed; the number
// `allocation` is never used twice in a process, so it tells new memory from old.
struct MemoryName {
  uint8_t handle[64] = {};
  uint64_t base = 0;    // where the allocation begins, in the process that has it
  uint64_t offset = 0;  // from there
  uint64_t allocation = 0;
};

// An allocation of this process.
struct MemoryRange {
  uint64_t base = 0;
  uint64_t bytes = 0;
  uint64_t allocation = 0;  // as in MemoryName
};

struct DeviceTable {
  uint32_t version;
  uint32_t bytes;       // of this structure
  const char* release;  // of smddp
  bool isCuda;          // false: of a device made up for tests

  const char* (*textOf)(int error);
  int (*allocate)(int device, size_t bytes, void** memory);
  int (*free)(int device, void* memory);
  // The allocation in which memory lies. An error for memory that has none of its own, such as a virtual address range.
  int (*rangeOf)(int device, const void* data, MemoryRange* range);
  // The name by which other processes open memory. An error for memory that cannot be shared, such as that of a virtual
  // address range.
  int (*nameOf)(int device, const void* data, MemoryName* name);
  // Opens an allocation of another process on the same GPU, and returns where it begins. It has to be closed as often
  // as it was opened.
  int (*open)(int device, const uint8_t handle[64], void** base);
  int (*close)(int device, void* base);
  // Enqueues a job.
  int (*run)(int device, const Job* job, void* stream);
};

using TableFunction = const DeviceTable* (*)();

}  // namespace smddp::cuda
