// Which way calls on the tensors of GPUs go, decided from what all ranks know alike.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace smddp::cuda {

enum class Path : uint8_t { Host, Nccl, Ipc, Rails };
constexpr const char* toString(Path path) {
  return path == Path::Host   ? "host"
         : path == Path::Nccl ? "nccl"
         : path == Path::Ipc  ? "ipc"
                              : "rails";
}

// Where one rank's tensors are.
struct Place {
  int node = 0;
  std::string device;  // its UUID
};

struct Choice {
  Path path;
  std::string reason;
};

// What SMDDP_GPU_PATH says, if it decides alone: "host" and "nccl", and whatever it says when NCCL is missing.
// Throws Usage for "nccl" without NCCL.
bool decidesAlone(const std::string& setting, bool haveNccl);

// The way of a call among these ranks: NCCL where each has a GPU of its own on one node. "ipc": the memory of the GPU
// where all share one; "rails": NCCL inside nodes, the host between them, where nodes have equally many ranks, each with
// a GPU of its own. For other ranks these two say no more than "auto".
Choice choosePath(const std::string& setting, bool haveNccl, std::span<const Place> ranks);

}  // namespace smddp::cuda
