#include "engine/calls/call.h"

#include <fmt/format.h>

namespace smddp::engine::calls {
namespace {

std::string printBytes(uint64_t bytes) {
  if (bytes < 10240) return fmt::format("{} B", bytes);
  if (bytes < (10u << 20)) return fmt::format("{:.1f} KiB", static_cast<double>(bytes) / 1024);
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

}  // namespace

// The bytes may come from another process: every field is checked before it is used.
std::string describe(const transport::CallFingerprint& call, std::span<const Rank> jobRanks) {
  if (call.collective >= collectives::kNumCollectives || call.dtype >= kNumDataTypes ||
      call.op >= kNumReduceOps) {
    return "an unknown operation";
  }
  const char* ofBlocks = nullptr;
  switch (static_cast<PartOf>(call.flags)) {
    case PartOf::Itself: break;
    case PartOf::AllToAllWithSplits: return "alltoall with split sizes";
    case PartOf::SparseAllReduce: return "allreduce of a sparse tensor";
    case PartOf::SplitGroup: return "split_group";
    case PartOf::UnevenAllGather: ofBlocks = "all_gather"; break;
    case PartOf::UnevenReduceScatter: ofBlocks = "reduce_scatter"; break;
    default: return "an unknown operation";
  }
  const auto collective = static_cast<collectives::Collective>(call.collective);
  const auto type = static_cast<DataType>(call.dtype);
  if (collective == collectives::Collective::Barrier) return "barrier";
  const auto op = static_cast<ReduceOp>(call.op);
  const bool isScaled = op == ReduceOp::PREMUL_SUM;
  const uint64_t bytes = isScaled ? call.bytes & ((uint64_t{1} << kLengthBits) - 1) : call.bytes;
  std::string text = fmt::format("{} of ", toString(collective));
  // A call that only copies has no type here, whatever type the tensor has.
  if (!isReduction(collective)) {
    text += printBytes(bytes);
  } else {
    text += fmt::format("{} {} ({}) with {}", bytes / sizeOf(type), toString(type),
                        printBytes(bytes), toString(op));
    if (isScaled) text += fmt::format(" by {}", std::bit_cast<float>(call.root));
  }
  if (hasRoot(collective)) {
    const bool isSource = collective == collectives::Collective::Broadcast ||
                          collective == collectives::Collective::Scatter;
    const uint64_t root = isScaled ? call.bytes >> kLengthBits : static_cast<uint64_t>(call.root);
    const uint64_t name = root < jobRanks.size() ? static_cast<uint64_t>(jobRanks[root]) : root;
    text += fmt::format(" {} rank {}", isSource ? "from" : "to", name);
  }
  // "reduce of 3 float32 (12 B) with SUM to rank 1, for reduce_scatter of blocks of several sizes"
  if (ofBlocks != nullptr) text += fmt::format(", for {} of blocks of several sizes", ofBlocks);
  return text;
}

std::string describeTag(int32_t tag) {
  return tag < 0 ? "within a collective" : fmt::format("with tag {}", tag);
}

}  // namespace smddp::engine::calls
