// A GPU for ranks that are objects of one test: memory of the host, kernels of the CPU, and a record of each access.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_table.h"
#include "cuda/shared_call.h"
#include "reduction/reduce.h"

namespace smddp::cuda {

// The state of the table's functions, which belong to no object.
struct FakeGpu {
  struct Access {
    int rank, turn;
    const std::byte *begin, *end;
    bool writes;
  };
  struct Allocation {
    size_t bytes;
    uint64_t number;
  };
  std::map<std::byte*, Allocation> allocations;
  uint64_t allocated = 0;
  std::map<int, bool> refusesToShare;  // by device number, which is the rank here
  bool refusesToOpen = false;
  int opened = 0, closed = 0;
  std::vector<Access> accesses;
  std::map<int, int> turns;                // of ranks: how many exchanges they have seen end
  std::map<int, std::vector<Job>> queues;  // kernels that have not run, by rank

  static FakeGpu& get() {
    static FakeGpu gpu;
    return gpu;
  }

  void note(int rank, const void* data, size_t bytes, bool writes) {
    const auto* begin = static_cast<const std::byte*>(data);
    if (bytes > 0) accesses.push_back({rank, turns[rank], begin, begin + bytes, writes});
  }
  void runQueue(int rank) {
    for (const Job& job : std::exchange(queues[rank], {})) {
      const size_t bytes = job.count * sizeOf(job.type);
      for (int s = 0; s < job.numSrcs; ++s) note(rank, job.srcs[s], bytes, false);
      for (int d = 0; d < job.numDsts; ++d) note(rank, job.dsts[d], bytes, true);
      reduction::reduce({job.dsts, static_cast<size_t>(job.numDsts)},
                        {job.srcs, static_cast<size_t>(job.numSrcs)}, job.count, job.type, job.op,
                        {job.pre, job.post, job.factor, static_cast<double>(job.divisor)});
    }
  }
  // Checks that between two exchanges no rank writes what another one touches. Clears the record.
  void expectNoRace() {
    std::map<int, std::vector<Access>> ofTurn;
    for (const Access& access : std::exchange(accesses, {})) ofTurn[access.turn].push_back(access);
    for (const auto& [turn, together] : ofTurn) {
      for (const Access& one : together) {
        for (const Access& two : together) {
          if (!one.writes || one.rank == two.rank) continue;
          EXPECT_FALSE(one.begin < two.end && two.begin < one.end)
              << "in turn " << turn << " rank " << one.rank << " writes what rank " << two.rank
              << (two.writes ? " writes" : " reads");
        }
      }
    }
  }
};

inline int fakeNameOf(int rank, const void* data, MemoryName* name) {
  FakeGpu& gpu = FakeGpu::get();
  if (gpu.refusesToShare[rank]) return 1;
  auto* const at = static_cast<std::byte*>(const_cast<void*>(data));
  auto found = gpu.allocations.upper_bound(at);
  if (found == gpu.allocations.begin()) return 2;
  --found;
  std::memcpy(name->handle, &found->first, sizeof found->first);
  name->base = reinterpret_cast<uint64_t>(found->first);
  name->offset = static_cast<uint64_t>(at - found->first);
  name->allocation = found->second.number;
  return 0;
}

inline const DeviceTable kFakeTable = {
    .version = kTableVersion,
    .bytes = sizeof(DeviceTable),
    .release = "test",
    .isCuda = false,
    .textOf = [](int) { return "the fake says no"; },
    .allocate =
        [](int, size_t bytes, void** memory) {
          FakeGpu& gpu = FakeGpu::get();
          auto* const data =
              static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
          gpu.allocations[data] = {bytes, ++gpu.allocated};
          *memory = data;
          return 0;
        },
    .free =
        [](int, void* memory) {
          FakeGpu::get().allocations.erase(static_cast<std::byte*>(memory));
          std::free(memory);
          return 0;
        },
    .rangeOf = [](int, const void*, MemoryRange*) { return 1; },
    .nameOf = fakeNameOf,
    .open =
        [](int, const uint8_t* handle, void** base) {
          FakeGpu& gpu = FakeGpu::get();
          if (gpu.refusesToOpen) return 3;
          std::memcpy(base, handle, sizeof *base);
          ++gpu.opened;
          return 0;
        },
    .close =
        [](int, void*) {
          ++FakeGpu::get().closed;
          return 0;
        },
    .run =
        [](int rank, const Job* job, void*) {
          FakeGpu::get().queues[rank].push_back(*job);
          return 0;
        },
};

}  // namespace smddp::cuda
