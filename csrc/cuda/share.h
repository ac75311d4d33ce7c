// Divides a collective among ranks that share a GPU: makes the jobs of each rank from a call. Pure functions.
//
// All collectives have one form: the input of some ranks goes to some ranks, as a whole or in blocks, reduced or not. A
// table in share.cc says which for each collective.
//
// There are two ways. *Direct*: every rank reads its share from the other ranks' tensors, and writes its result into
// them. That is one part, and each rank reads each byte that it needs once. *Staged*, where some memory cannot be
// opened by other processes: every rank copies a piece of its tensor into its workspace, and takes what it needs from
// all workspaces. The workspace has two halves, which pieces use in turn: part p stages piece p, and takes piece p - 1.
//
// Exchanges separate the parts (shared_call.h): when a rank begins a part, the GPU has finished the part before on all
// ranks.
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
  // The size of the vector, or of one rank's block where every rank has one. In AllToAll that of the longest block,
  // which is known after the first exchange.
  uint64_t bytes = 0;
};

// The bytes of the blocks of an AllToAll that go to and come from each rank. Only sender and receiver know a block's
// size.
struct Splits {
  std::array<uint64_t, kMaxSharing> to{}, from{};
};

// Where the tensors of a call lie, by this process's addresses. In calls that work in place both are the same. Null
// where a tensor is empty, or where this rank has none.
struct Buffers {
  std::byte* input = nullptr;
  std::byte* output = nullptr;
  Splits splits;  // AllToAll
};

// This rank's part of a direct call; `all` is indexed by rank. No two ranks write the same bytes, and no rank writes
// bytes that another rank reads.
std::vector<Job> directJobs(const Call& call, const std::vector<Buffers>& all);

// The number of parts of a staged call, with workspaces of twice `half` bytes; `half` is a multiple of 16 * size.
int64_t numStagedParts(const Call& call, uint64_t half);
// This rank's jobs of a part: they take piece `part` - 1 and stage piece `part`.
std::vector<Job> stagedJobs(const Call& call, int64_t part, uint64_t half, const Buffers& mine,
                            const std::vector<std::byte*>& workspaces);

}  // namespace smddp::cuda
