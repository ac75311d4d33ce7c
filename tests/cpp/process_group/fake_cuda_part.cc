// The fake device's libsmddp_cuda.so: the same table of functions. Other processes open memory through its file. A
// kernel is a task of a stream, and the kernels of the CPU compute it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "cuda/device_table.h"
#include "process_group/fake_device.h"
#include "reduction/reduce.h"

namespace fake_device {
namespace {

using smddp::cuda::Job;
using smddp::cuda::MemoryName;

enum Failure : int { kNone, kOutOfMemory, kNotShared, kNotOpened };

struct Allocation {
  int file;
  size_t bytes;
  uint64_t number;
  bool isTensor;
};
std::map<const void*, Allocation>& allocations() {  // guarded by World::mutex
  static auto* all = new std::map<const void*, Allocation>;
  return *all;
}
std::map<const void*, size_t>& opened() {  // the same
  static auto* all = new std::map<const void*, size_t>;
  return *all;
}

struct Handle {
  pid_t process;
  int file;
  size_t bytes;
};

int allocate(int, size_t bytes, void** memory) {
  *memory = allocateShared(bytes, false);
  return kNone;
}

// Waits for the device, as the driver does.
int release(int, void* memory) {
  for (Lane& lane : world().lanes) lane.drain();
  freeShared(memory);
  return kNone;
}

int rangeOf(int, const void* data, smddp::cuda::MemoryRange* range) {
  if (!world().sharesMemory) return kNotShared;
  const std::lock_guard lock(world().mutex);
  const auto after = allocations().upper_bound(data);
  if (after == allocations().begin()) return kNotShared;
  const auto& [base, allocation] = *std::prev(after);
  if (data >= static_cast<const std::byte*>(base) + allocation.bytes) return kNotShared;
  const size_t most = world().rangeBytes;
  const size_t offset = static_cast<const std::byte*>(data) - static_cast<const std::byte*>(base);
  const size_t skipped = offset / most * most;
  *range = {reinterpret_cast<uint64_t>(base) + skipped, std::min(most, allocation.bytes - skipped),
            allocation.number};
  return kNone;
}

int nameOf(int, const void* data, MemoryName* name) {
  if (!world().sharesMemory) return kNotShared;
  const std::lock_guard lock(world().mutex);
  auto after = allocations().upper_bound(data);
  if (after == allocations().begin()) return kNotShared;
  const auto& [base, allocation] = *--after;
  if (allocation.isTensor && !world().sharesTensors) return kNotShared;
  name->base = reinterpret_cast<uint64_t>(base);
  name->offset = reinterpret_cast<uint64_t>(data) - name->base;
  name->allocation = allocation.number;
  const Handle handle{getpid(), allocation.file, allocation.bytes};
  std::memcpy(name->handle, &handle, sizeof handle);
  return kNone;
}

int open(int, const uint8_t* from, void** base) {
  Handle handle;
  std::memcpy(&handle, from, sizeof handle);
  if (handle.process == getpid()) return kNotOpened;  // as the driver does
  const std::string path =
      "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return kNotOpened;
  *base = mmap(nullptr, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (*base == MAP_FAILED) return kNotOpened;
  const std::lock_guard lock(world().mutex);
  opened()[*base] = handle.bytes;
  return kNone;
}

int close(int, void* base) {
  const std::lock_guard lock(world().mutex);
  const auto found = opened().extract(base);
  if (!found) return kNotOpened;
  munmap(base, found.mapped());
  return kNone;
}

// Whether it is memory of this process that has not been freed, or memory that this process has opened.
bool isLive(const void* data) {
  const std::lock_guard lock(world().mutex);
  const auto own = allocations().upper_bound(data);
  if (own != allocations().begin()) {
    const auto& [base, allocation] = *std::prev(own);
    if (data < static_cast<const std::byte*>(base) + allocation.bytes) return true;
  }
  const auto others = opened().upper_bound(data);
  if (others == opened().begin()) return false;
  const auto& [base, bytes] = *std::prev(others);
  return data < static_cast<const std::byte*>(base) + bytes;
}

// What a kernel does. Runs on the thread of a stream.
void execute(const Job& job) {
  const bool live = std::all_of(job.srcs, job.srcs + job.numSrcs, isLive) &&
                    std::all_of(job.dsts, job.dsts + job.numDsts, isLive);
  if (!live) {
    ++world().violations;
    return;
  }
  for (int s = 0; s < job.numSrcs; ++s) {
    for (int d = 0; d < job.numDsts; ++d) {
      // On a GPU, source and destination must not overlap in part.
      const auto* from = static_cast<const std::byte*>(job.srcs[s]);
      const auto* into = static_cast<const std::byte*>(job.dsts[d]);
      const size_t bytes = job.count * sizeOf(job.type);
      if (from != into && from < into + bytes && into < from + bytes) ++world().violations;
    }
  }
  smddp::reduction::reduce({job.dsts, static_cast<size_t>(job.numDsts)},
                           {job.srcs, static_cast<size_t>(job.numSrcs)}, job.count, job.type,
                           job.op,
                           {job.pre, job.post, job.factor, static_cast<double>(job.divisor)});
}

int run(int, const Job* job, void* stream) {
  ++world().jobs;
  laneOf(streamOf(stream)).add([job = *job] {
    std::this_thread::sleep_for(std::chrono::milliseconds(world().slowness));
    execute(job);
  });
  return kNone;
}

const char* textOf(int error) {
  switch (error) {
    case kOutOfMemory: return "the made-up device has no memory left";
    case kNotShared: return "the made-up device does not share its memory";
    default: return "the made-up device cannot open this memory";
  }
}

const smddp::cuda::DeviceTable kTable = {
    smddp::cuda::kTableVersion,
    sizeof(smddp::cuda::DeviceTable),
    "made up",
    /*isCuda=*/false,
    textOf,
    allocate,
    release,
    rangeOf,
    nameOf,
    open,
    close,
    run,
};

}  // namespace

void* allocateShared(size_t bytes, bool isTensor) {
  const int file = memfd_create("fake-device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) throw std::bad_alloc();
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  static std::atomic<uint64_t> number{0};
  const std::lock_guard lock(world().mutex);
  allocations()[data] = {file, bytes, ++number, isTensor};
  world().live[data] = bytes;
  return data;
}

void freeShared(void* data) {
  const std::lock_guard lock(world().mutex);
  world().live.erase(data);
  const auto found = allocations().extract(data);
  munmap(data, found.mapped().bytes);
  ::close(found.mapped().file);
}

}  // namespace fake_device

extern "C" __attribute__((visibility("default"))) const smddp::cuda::DeviceTable*
smddp_device_table() {
  return &fake_device::kTable;
}
