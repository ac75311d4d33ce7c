// Collectives, independent of any algorithm: their names, the shape of a request, and the signature of all algorithms.
#pragma once

#include <cstdint>

#include "common/encoding.h"
#include "common/types.h"
#include "plan/builder.h"

namespace smddp::collectives {

enum class Collective : uint8_t {
  AllReduce,
  Broadcast,
  AllGather,
  ReduceScatter,
  Barrier,
  Reduce,
  Gather,
  Scatter,
  AllToAll,
};
inline constexpr int kNumCollectives = 9;

constexpr const char* toString(Collective collective) {
  switch (collective) {
    case Collective::AllReduce: return "allreduce";
    case Collective::Broadcast: return "broadcast";
    case Collective::AllGather: return "allgather";
    case Collective::ReduceScatter: return "reduce_scatter";
    case Collective::Barrier: return "barrier";
    case Collective::Reduce: return "reduce";
    case Collective::Gather: return "gather";
    case Collective::Scatter: return "scatter";
    case Collective::AllToAll: return "alltoall";
  }
  return "?";
}

// True if contributions are combined by the request's reduce operation.
constexpr bool isReduction(Collective collective) {
  return collective == Collective::AllReduce || collective == Collective::ReduceScatter ||
         collective == Collective::Reduce;
}

// True if one rank, the root, has another part than the others.
constexpr bool hasRoot(Collective collective) {
  return collective == Collective::Broadcast || collective == Collective::Reduce ||
         collective == Collective::Gather || collective == Collective::Scatter;
}

// A plan depends on its shape, the topology and the limits only. The shape is the key of the plan cache.
//
//   collective      input bytes        output bytes
//   AllReduce       bytes              bytes
//   Broadcast       bytes (root's)     bytes      input and output are the same buffer
//   AllGather       bytes              P * bytes  rank r's block at r * bytes
//   ReduceScatter   P * bytes          bytes      block r of the input goes to rank r
//   Barrier         0                  0
//   Reduce          bytes              root:      bytes, the same buffer as its input
//                                      others:    0; their inputs are left as they are
//   Gather          bytes              root:      P * bytes, rank r's block at r * bytes
//                                      others:    0
//   Scatter         root: P * bytes    bytes      block r of the root's input goes to rank r
//                   others: 0
//   AllToAll        P * bytes          P * bytes  block r of the input goes to rank r, which stores the
//                                                 block of sender s at s * bytes
//
// P is the number of ranks. AllReduce may also work in place. `bytes` is a multiple of the element size, so every
// cut falls between elements (see plan::kGranule). If a rank has several blocks, a block need not begin at a
// granule; cuts are made relative to the start of the block.
struct Shape {
  Collective collective = Collective::AllReduce;
  int64_t bytes = 0;
  Rank root = 0;
  // The buffers of all ranks of the node lie in shared memory. The plan may use mateIn and mateOut.
  bool shared = false;
  // The plan is chosen after the ranks of the node have arrived. It starts behind its preamble, so the preamble must
  // not copy anything.
  bool afterArrival = false;
  // The format of elements between nodes. A format other than fp32 is only for reductions of float32 with SUM or AVG,
  // on several nodes.
  Wire wire = Wire::fp32;
  // Encodes with error feedback. The messages are the same without it, so ranks need not agree.
  bool feedback = false;
  friend bool operator==(const Shape&, const Shape&) = default;
};

// The buffers of one rank, according to the table.
struct BufferSizes {
  int64_t inputBytes = 0;
  int64_t outputBytes = 0;
  bool inPlace = false;  // input and output are the same buffer
};

constexpr BufferSizes buffersOf(const Shape& shape, Rank rank, int numRanks) {
  const int64_t one = shape.bytes, all = numRanks * one;
  const bool isRoot = rank == shape.root;
  switch (shape.collective) {
    case Collective::AllReduce:
    case Collective::Broadcast: return {one, one, true};
    case Collective::AllGather: return {one, all};
    case Collective::ReduceScatter: return {all, one};
    case Collective::Barrier: return {};
    case Collective::Reduce: return {one, isRoot ? one : 0, isRoot};
    case Collective::Gather: return {one, isRoot ? all : 0};
    case Collective::Scatter: return {isRoot ? all : 0, one};
    case Collective::AllToAll: return {all, all};
  }
  return {};
}

// Builds the plan of topology.me(). A pure function: all ranks pass the same arguments, apart from me(), and their
// plans fit together. The messages between nodes, with their lengths and numbers, must not depend on `shared`,
// because each node decides that for itself.
using Algorithm = plan::Plan (*)(const plan::Topology&, const plan::Limits&, const Shape&);

}  // namespace smddp::collectives
