// Which way calls on GPU tensors go. All ranks decide from the same facts.
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

// The GPU of one rank.
struct Place {
  int node = 0;
  std::string device;  // its UUID
};

struct Choice {
  Path path;
  std::string reason;
};

// Whether the choice does not depend on the ranks' GPUs: SMDDP_GPU_PATH is "host" or "nccl", or there is no NCCL.
// Throws Usage for "nccl" without NCCL.
bool decidesAlone(const std::string& setting, bool haveNccl);

// The way of calls among these ranks. "auto": NCCL where each rank has a GPU of its own on one node, else the host.
// "ipc": the memory of the GPU where all ranks share one, else as "auto". "rails": NCCL inside nodes and the host
// between them, where nodes have equally many ranks, each with a GPU of its own, else as "auto".
Choice choosePath(const std::string& setting, bool haveNccl, std::span<const Place> ranks);

}  // namespace smddp::cuda
