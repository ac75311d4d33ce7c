// The collectives with a root.
#include <tuple>

#include "process_group/checks.h"
#include "process_group/errors.h"
#include "process_group/process_group.h"

namespace smddp::process_group {

using c10::intrusive_ptr;
using collectives::Collective;
using engine::calls::Request;

intrusive_ptr<c10d::Work> ProcessGroup::broadcast(std::vector<at::Tensor>& tensors,
                                                  const c10d::BroadcastOptions& options) {
  constexpr auto kName = "broadcast";
  const at::Tensor& tensor = onlyTensor(kName, tensors);
  requireRank(kName, options.rootRank, getSize(), "source");
  Work::Call call(c10d::OpType::BROADCAST, "smddp:broadcast", tensors, {tensors});
  call.staging.begin(*devices_, {Collective::Broadcast});
  Request request = newRequest(Collective::Broadcast, options.timeout, options.asyncOp);
  request.root = static_cast<Rank>(options.rootRank);
  if (getRank() == options.rootRank) {
    requireDense(kName, tensor);
    request.output = {call.staging.toSend(tensor)};
  } else {
    requireWritable(kName, tensor);
    request.output = {call.staging.toWrite(tensor)};
  }
  request.bytes = numBytes(tensor);
  return submit(std::move(call), std::move(request));
}

intrusive_ptr<c10d::Work> ProcessGroup::reduce(std::vector<at::Tensor>& tensors,
                                               const c10d::ReduceOptions& options) {
  constexpr auto kName = "reduce";
  const at::Tensor& tensor = onlyTensor(kName, tensors);
  requireRank(kName, options.rootRank, getSize(), "destination");
  Work::Call call(c10d::OpType::REDUCE, "smddp:reduce", tensors, {tensors});
  Request request = newRequest(Collective::Reduce, options.timeout, options.asyncOp);
  request.root = static_cast<Rank>(options.rootRank);
  const bool isRoot = getRank() == options.rootRank;
  if (isRoot) {
    requireWritable(kName, tensor);
  } else {
    requireDense(kName, tensor);
  }
  request.type = reducibleType(kName, tensor);
  setReduceOp(kName, options.reduceOp, request.type, request);
  call.staging.begin(*devices_, {Collective::Reduce, request.op});
  if (isRoot) {
    request.output = {call.staging.toUpdate(tensor)};
  } else {
    request.input = {call.staging.toRead(tensor)};
  }
  request.bytes = numBytes(tensor);
  addResidual(request, tensor);
  return submit(std::move(call), std::move(request));
}

intrusive_ptr<c10d::Work> ProcessGroup::gather(std::vector<std::vector<at::Tensor>>& outputs,
                                               std::vector<at::Tensor>& inputs,
                                               const c10d::GatherOptions& options) {
  constexpr auto kName = "gather";
  const at::Tensor& input = onlyTensor(kName, inputs);
  requireRank(kName, options.rootRank, getSize(), "destination");
  requireDense(kName, input);
  const bool isRoot = getRank() == options.rootRank;
  const auto& output = onlyList(kName, outputs, isRoot, "output list");
  Work::Call call(c10d::OpType::GATHER, "smddp:gather", inputs, {output});
  call.staging.begin(*devices_, {Collective::Gather});
  Request request = newRequest(Collective::Gather, options.timeout, options.asyncOp);
  request.root = static_cast<Rank>(options.rootRank);
  request.bytes = numBytes(input);
  // The root copies its own block to the output; other ranks only send theirs.
  request.input = {isRoot ? call.staging.toRead(input) : call.staging.toSend(input)};
  if (isRoot) {
    requireList(kName, output, static_cast<size_t>(getSize()), input, "output list");
    requireSameSizes(kName, output, input, "output list");
    for (const at::Tensor& tensor : output) requireWritable(kName, tensor);
    request.output = call.staging.toWrite(output);
  }
  return submit(std::move(call), std::move(request));
}

intrusive_ptr<c10d::Work> ProcessGroup::scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ScatterOptions& options) {
  constexpr auto kName = "scatter";
  const at::Tensor& output = onlyTensor(kName, outputs);
  requireRank(kName, options.rootRank, getSize(), "source");
  requireWritable(kName, output);
  const bool isRoot = getRank() == options.rootRank;
  const auto& input = onlyList(kName, inputs, isRoot, "input list");
  Work::Call call(c10d::OpType::SCATTER, "smddp:scatter", input, {outputs});
  call.staging.begin(*devices_, {Collective::Scatter});
  Request request = newRequest(Collective::Scatter, options.timeout, options.asyncOp);
  request.root = static_cast<Rank>(options.rootRank);
  request.bytes = numBytes(output);
  if (isRoot) {
    requireList(kName, input, static_cast<size_t>(getSize()), output, "input list");
    requireSameSizes(kName, input, output, "input list");
    const int64_t count = output.numel();
    std::tie(request.input, request.output) =
        call.staging.placeBlocks({input, getRank() * count, count}, {output, 0, count});
  } else {
    request.output = {call.staging.toWrite(output)};
  }
  return submit(std::move(call), std::move(request));
}

}  // namespace smddp::process_group
