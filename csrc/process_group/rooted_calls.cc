// The calls with a root.
#include "process_group/checks.h"
#include "process_group/errors.h"
#include "process_group/process_group.h"

namespace smddp::process_group {

using c10::intrusive_ptr;
using collectives::Collective;
using engine::Request;

intrusive_ptr<c10d::Work> ProcessGroup::broadcast(std::vector<at::Tensor>& tensors,
                                                  const c10d::BroadcastOptions& options) {
  constexpr auto kName = "broadcast";
  const at::Tensor& tensor = onlyTensor(kName, tensors);
  requireRank(kName, options.rootRank, getSize(), "source");
  Work::Call call(c10d::OpType::BROADCAST, "smddp:broadcast", tensors, {tensors});
  chooseStaging(call.staging, Collective::Broadcast, tensor);
  Request request = newRequest(Collective::Broadcast, options.timeout, options.asyncOp);
  request.root = static_cast<Rank>(options.rootRank);
  if (getRank() == options.rootRank) {
    requireDense(kName, tensor);
    request.output = {sendsFromDevice(call.staging, tensor) ? call.staging.readInPlace(tensor)
                                                            : call.staging.read(tensor)};
  } else {
    requireWritable(kName, tensor);
    request.output = {call.staging.write(tensor)};
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
  chooseStaging(call.staging, Collective::Reduce, tensor, options.reduceOp);
  Request request = newRequest(Collective::Reduce, options.timeout, options.asyncOp);
  request.root = static_cast<Rank>(options.rootRank);
  if (getRank() == options.rootRank) {
    requireWritable(kName, tensor);
    request.output = {call.staging.update(tensor)};
  } else {
    requireDense(kName, tensor);
    request.input = {call.staging.read(tensor)};
  }
  request.type = reducibleType(kName, tensor);
  setReduceOp(kName, options.reduceOp, request.type, request);
  request.bytes = numBytes(tensor);
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
  chooseStaging(call.staging, Collective::Gather, input);
  Request request = newRequest(Collective::Gather, options.timeout, options.asyncOp);
  request.root = static_cast<Rank>(options.rootRank);
  request.bytes = numBytes(input);
  const bool isDirect = !isRoot && sendsFromDevice(call.staging, input);
  request.input = {isDirect ? call.staging.readInPlace(input) : call.staging.read(input)};
  if (isRoot) {
    requireList(kName, output, static_cast<size_t>(getSize()), input, "output list");
    requireSameSizes(kName, output, input, "output list");
    for (const at::Tensor& tensor : output) requireWritable(kName, tensor);
    request.output = call.staging.write(output);
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
  chooseStaging(call.staging, Collective::Scatter, output);
  Request request = newRequest(Collective::Scatter, options.timeout, options.asyncOp);
  request.root = static_cast<Rank>(options.rootRank);
  request.bytes = numBytes(output);
  if (isRoot) {
    requireList(kName, input, static_cast<size_t>(getSize()), output, "input list");
    requireSameSizes(kName, input, output, "input list");
    if (sendsFromDevice(call.staging, input)) {
      request.input = call.staging.readInPlace(input);
      request.output = call.staging.writeAround({output}, 0, input[static_cast<size_t>(getRank())]);
      return submit(std::move(call), std::move(request));
    }
    request.input = call.staging.read(input);
  }
  request.output = {call.staging.write(output)};
  return submit(std::move(call), std::move(request));
}

}  // namespace smddp::process_group
