// Records for torch.profiler the arguments of torch's event "record_param_comms" (collective, numbers of elements,
// type, ranks of the group), as NCCL's process group does. Tools that compare the ranks' traces read them.
#pragma once

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include <string>
#include <tuple>
#include <vector>

#include "process_group/work.h"

namespace smddp::process_group {

struct CommsRecord {
  explicit CommsRecord(const Work::Call& call);
  std::string collective;              // as torch's NCCL names it: "allreduce", "_allgather_base"
  std::tuple<int64_t, bool> sequence;  // the call's number, and whether it is a send or a receive
  std::vector<at::Tensor> inputs, outputs;
  int64_t inputElements = 0, outputElements = 0;
  at::ScalarType type = at::kByte;
};

// A group's global ranks as the event has them: first, first + stride, … Of others, stride -1.
struct GlobalRanks {
  int first = 0;
  int stride = 1;
  static GlobalRanks of(const std::vector<int>& ranks);
};

}  // namespace smddp::process_group
