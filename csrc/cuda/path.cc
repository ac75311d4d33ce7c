#include "cuda/path.h"

#include <map>

#include "common/error.h"

namespace smddp::cuda {

bool decidesAlone(const std::string& setting, bool haveNccl) {
  if (setting != "auto" && setting != "host" && setting != "nccl") {
    raise(ErrorKind::Usage, "SMDDP_GPU_PATH={}: expected auto, host or nccl", setting);
  }
  if (setting == "nccl" && !haveNccl) {
    raise(ErrorKind::Usage, "SMDDP_GPU_PATH=nccl: this torch was built without NCCL");
  }
  return setting != "auto" || !haveNccl;
}

Choice choosePath(const std::string& setting, bool haveNccl, std::span<const Place> ranks) {
  if (decidesAlone(setting, haveNccl)) {
    if (setting == "auto") return {Path::Host, "this torch was built without NCCL"};
    return {setting == "nccl" ? Path::Nccl : Path::Host, "SMDDP_GPU_PATH=" + setting};
  }
  for (const Place& place : ranks) {
    if (place.node != ranks[0].node) return {Path::Host, "the ranks are on several nodes"};
  }
  std::map<std::string, size_t> ownerOf;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto [other, isNew] = ownerOf.emplace(ranks[rank].device, rank);
    if (isNew) continue;
    return {Path::Host,
            fmt::format("ranks {} and {} share GPU {}", other->second, rank, other->first)};
  }
  return {Path::Nccl, "each rank has a GPU of its own on one node"};
}

}  // namespace smddp::cuda
