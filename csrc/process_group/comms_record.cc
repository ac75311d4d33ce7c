#include "process_group/comms_record.h"

#include <algorithm>
#include <cctype>

namespace smddp::process_group {
namespace {

int64_t elementsOf(const std::vector<at::Tensor>& tensors) {
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) elements += tensor.numel();
  return elements;
}

std::string nameOf(const Work::Call& call) {
  switch (call.type) {
    case c10d::OpType::RECVANYSOURCE: return "recv";
    case c10d::OpType::ALLTOALL: return "all_to_all";
    case c10d::OpType::ALLTOALL_BASE:
      return call.inputSplits.empty() && call.outputSplits.empty() ? "all_to_all" : "all_to_allv";
    default: break;
  }
  std::string name = c10d::opTypeToString(call.type);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return name;
}

}  // namespace

CommsRecord::CommsRecord(const Work::Call& call)
    : collective(nameOf(call)),
      sequence(static_cast<int64_t>(call.sequence), c10d::isP2POp(call.type)),
      inputs(call.memory->inputs) {
  for (const auto& list : call.memory->outputs)
    outputs.insert(outputs.end(), list.begin(), list.end());
  inputElements = elementsOf(inputs);
  outputElements = elementsOf(outputs);
  const auto& typed = inputs.empty() ? outputs : inputs;
  if (!typed.empty()) type = typed.front().scalar_type();
}

GlobalRanks GlobalRanks::of(const std::vector<int>& ranks) {
  if (ranks.empty()) return {};
  const int stride = ranks.size() > 1 ? ranks[1] - ranks[0] : 1;
  for (size_t i = 1; i < ranks.size(); ++i) {
    if (stride <= 0 || ranks[i] - ranks[i - 1] != stride) return {ranks.front(), -1};
  }
  return {ranks.front(), stride};
}

}  // namespace smddp::process_group
