#include "engine/call.h"

#include <fmt/format.h>

namespace smddp::engine {
namespace {

std::string printBytes(uint64_t bytes) {
  if (bytes < 10240) return fmt::format("{} B", bytes);
  if (bytes < (10u << 20)) return fmt::format("{:.1f} KiB", static_cast<double>(bytes) / 1024);
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

}  // namespace

// The bytes may come from another process: every field is checked before it is used.
std::string describe(const transport::CallFingerprint& call) {
  if (call.collective >= collectives::kNumCollectives || call.dtype >= kNumDataTypes ||
      call.op >= kNumReduceOps) {
    return "an unknown operation";
  }
  const auto collective = static_cast<collectives::Collective>(call.collective);
  const auto type = static_cast<DataType>(call.dtype);
  if (collective == collectives::Collective::Barrier) return "barrier";
  std::string text = fmt::format("{} of {} {} ({})", toString(collective),
                                 call.bytes / sizeOf(type), toString(type), printBytes(call.bytes));
  if (collective == collectives::Collective::AllReduce ||
      collective == collectives::Collective::ReduceScatter) {
    const auto op = static_cast<ReduceOp>(call.op);
    text += fmt::format(" with {}", toString(op));
    if (op == ReduceOp::PREMUL_SUM) text += fmt::format(" by {}", std::bit_cast<float>(call.root));
  }
  if (collective == collectives::Collective::Broadcast) {
    text += fmt::format(" from rank {}", call.root);
  }
  return text;
}

}  // namespace smddp::engine
