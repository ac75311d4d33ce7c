// Who does what in a collective among ranks that share a GPU: from a call to jobs for the GPU. Pure functions.
//
// All collectives are one thing: what some ranks have goes to some ranks, as a whole or in blocks, summed or not. A
// table in share.cc says which for each.
//
// Two ways. *Direct*: every rank reads its share where the others' tensors lie, and writes its result into the others'
// tensors; one part, each byte read once by whoever needs it. *Staged*, where some memory cannot be opened by others:
// every rank copies a piece of its tensor into its workspace, and takes what it needs from all workspaces; the pieces
// alternate between two halves, so that part p stages piece p while piece p - 1 is taken.
//
// The parts of different ranks are separated by exchanges (shared_call.h): when a rank begins a part, the GPU has
// finished the one before, of all ranks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/job.h"

namespace smddp::cuda {

enum class Operation : uint8_t {
  AllReduce,
  Reduce,
  ReduceScatter,
  AllGather,
  Gather,
  Broadcast,
  Scatter,
  AllToAll,
};

// A call as one rank makes it.
struct Call {
  Operation operation = Operation::AllReduce;
  DataType type = DataType::uint8;
  ReduceOp op = ReduceOp::SUM;
  double factor = 1.0;  // PREMUL_SUM
  int32_t root = 0;
  int32_t me = 0;
  int32_t size = 1;
  // Of the vector; of one rank's block, where every rank has one; of the longest block in AllToAll, which is known when
  // the ranks have met.
  uint64_t bytes = 0;
};

// The bytes of the blocks of an AllToAll that go to and come from each rank. Of a block only its two ranks know.
struct Splits {
  std::array<uint64_t, kMaxSharing> to{}, from{};
};

// Where the tensors of a call lie, in this process's addresses. For calls that work in place both are the same; what is
// empty, or what a rank has not, may be null.
struct Buffers {
  std::byte* input = nullptr;
  std::byte* output = nullptr;
  Splits splits;  // AllToAll
};

// This rank's part of a direct call; `all` by rank. The ranks' parts write different bytes, and none writes what
// another reads.
std::vector<Job> directJobs(const Call& call, const std::vector<Buffers>& all);

// The number of parts of a staged call, with workspaces of twice `half` bytes; `half` is a multiple of 16 * size.
int64_t numStagedParts(const Call& call, uint64_t half);
// This rank's part: takes piece `part` - 1, stages piece `part`.
std::vector<Job> stagedJobs(const Call& call, int64_t part, uint64_t half, const Buffers& mine,
                            const std::vector<std::byte*>& workspaces);

}  // namespace smddp::cuda
