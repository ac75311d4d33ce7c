// What a collective is, before any algorithm: its name, its shape, and the signature all algorithms share.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "plan/builder.h"

namespace smddp::collectives {

enum class Collective : uint8_t { AllReduce, Broadcast, AllGather, ReduceScatter, Barrier };
inline constexpr int kNumCollectives = 5;

constexpr const char* toString(Collective collective) {
  switch (collective) {
    case Collective::AllReduce: return "allreduce";
    case Collective::Broadcast: return "broadcast";
    case Collective::AllGather: return "allgather";
    case Collective::ReduceScatter: return "reduce_scatter";
    case Collective::Barrier: return "barrier";
  }
  return "?";
}

// All that an algorithm may depend on, besides topology and limits; the plan cache's key.
//
//   collective      input bytes        output bytes
//   AllReduce       bytes              bytes
//   Broadcast       bytes (root's)     bytes      input and output are the same buffer
//   AllGather       bytes              P * bytes  rank r's block at r * bytes
//   ReduceScatter   P * bytes          bytes      block r of the input goes to rank r
//   Barrier         0                  0
//
// `bytes` is a multiple of the element size, and with it every cut (see plan::kGranule) falls between elements.
// For AllGather and ReduceScatter the start of a block need not be a multiple of a granule; cuts are made
// inside the block.
struct Shape {
  Collective collective = Collective::AllReduce;
  int64_t bytes = 0;
  Rank root = 0;
  // The buffers of all ranks of a node lie in memory that the node shares: mateIn and mateOut may be used.
  bool shared = false;
  friend bool operator==(const Shape&, const Shape&) = default;
};

// Builds the plan of topology.me(). Pure: the plans of all ranks follow from the same arguments. What travels
// between nodes (messages, their lengths and numbers) must not depend on `shared`, which nodes
// may decide differently.
using Algorithm = plan::Plan (*)(const plan::Topology&, const plan::Limits&, const Shape&);

}  // namespace smddp::collectives
