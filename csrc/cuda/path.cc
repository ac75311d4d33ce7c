#include "cuda/path.h"

#include <algorithm>
#include <map>

#include "common/error.h"
#include "cuda/job.h"

namespace smddp::cuda {

bool decidesAlone(const std::string& setting, bool haveNccl) {
  if (setting == "nccl" && !haveNccl) {
    raise(ErrorKind::Usage, "SMDDP_GPU_PATH=nccl: this torch was built without NCCL");
  }
  return setting == "host" || setting == "nccl" || (setting == "auto" && !haveNccl);
}

namespace {

// Why these ranks cannot use rails; empty: they can.
std::string refusalOfRails(std::span<const Place> ranks) {
  std::map<int, std::map<std::string, size_t>> devices;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto [other, isNew] = devices[ranks[rank].node].emplace(ranks[rank].device, rank);
    if (!isNew) return fmt::format("ranks {} and {} share a GPU", other->second, rank);
  }
  const size_t first = devices.begin()->second.size();
  for (const auto& [node, ofNode] : devices) {
    if (ofNode.size() != first) return "nodes have different numbers of ranks";
  }
  return first < 2 ? "nodes have one rank each" : "";
}

}  // namespace

Choice choosePath(const std::string& setting, bool haveNccl, std::span<const Place> ranks) {
  if (decidesAlone(setting, haveNccl) && setting != "auto") {
    return {setting == "nccl" ? Path::Nccl : Path::Host, "SMDDP_GPU_PATH=" + setting};
  }
  const Place& first = ranks[0];
  const auto all = [&](const auto& same) { return std::all_of(ranks.begin(), ranks.end(), same); };
  const bool oneNode = all([&](const Place& place) { return place.node == first.node; });
  if (setting == "ipc" && oneNode && ranks.size() > 1 && ranks.size() <= kMaxSharing &&
      all([&](const Place& place) { return place.device == first.device; })) {
    return {Path::Ipc, "SMDDP_GPU_PATH=ipc, and all ranks share GPU " + first.device};
  }
  if (!haveNccl) return {Path::Host, "this torch was built without NCCL"};
  if (!oneNode && setting == "rails") {
    const std::string refusal = refusalOfRails(ranks);
    if (refusal.empty()) return {Path::Rails, "SMDDP_GPU_PATH=rails"};
    return {Path::Host, "SMDDP_GPU_PATH=rails is not possible: " + refusal};
  }
  if (!oneNode) return {Path::Host, "the ranks are on several nodes"};
  std::map<std::string, size_t> ownerOf;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto [other, isNew] = ownerOf.emplace(ranks[rank].device, rank);
    if (isNew) continue;
    return {Path::Host, fmt::format("ranks {} and {} share GPU {}; where there are more, "
                                    "torch.cuda.set_device() gives each rank its own",
                                    other->second, rank, other->first)};
  }
  return {Path::Nccl, "each rank has a GPU of its own on one node"};
}

}  // namespace smddp::cuda
