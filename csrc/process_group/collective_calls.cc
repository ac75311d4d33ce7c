// The collectives without a root.
#include <tuple>

#include "process_group/checks.h"
#include "process_group/errors.h"
#include "process_group/process_group.h"

namespace smddp::process_group {

using c10::intrusive_ptr;
using collectives::Collective;
using engine::calls::Request;

intrusive_ptr<c10d::Work> ProcessGroup::allreduce(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& options) {
  constexpr auto kName = "all_reduce";
  const at::Tensor& tensor = onlyTensor(kName, tensors);
  if (tensor.defined() && tensor.layout() == c10::kSparse)
    return allreduce_sparse(tensors, options);
  requireWritable(kName, tensor);
  Work::Call call(c10d::OpType::ALLREDUCE, "smddp:all_reduce", tensors, {tensors});
  Request request = newRequest(Collective::AllReduce, options.timeout, options.asyncOp);
  request.type = reducibleType(kName, tensor);
  setReduceOp(kName, options.reduceOp, request.type, request);
  call.staging.begin(*devices_, {Collective::AllReduce, request.op});
  request.output = {call.staging.toUpdate(tensor)};
  request.bytes = numBytes(tensor);
  addResidual(request, tensor);
  return submit(std::move(call), std::move(request));
}

intrusive_ptr<c10d::Work> ProcessGroup::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) {
  constexpr auto kName = "all_reduce_coalesced";
  if (tensors.empty()) throw std::invalid_argument("smddp: all_reduce_coalesced: no tensors");
  for (const at::Tensor& tensor : tensors) {
    requireWritable(kName, tensor);
    requireSameType(kName, tensor, tensors.front());
  }
  Work::Call call(c10d::OpType::ALLREDUCE_COALESCED, "smddp:all_reduce", tensors, {tensors});
  Request request = newRequest(Collective::AllReduce, options.timeout, options.asyncOp);
  request.type = reducibleType(kName, tensors.front());
  setReduceOp(kName, options.reduceOp, request.type, request);
  call.staging.begin(*devices_, {Collective::AllReduce, request.op});
  request.output = call.staging.toUpdate(tensors);
  request.bytes = engine::calls::totalBytes(request.output);
  addResidual(request, tensors);
  return submit(std::move(call), std::move(request));
}

intrusive_ptr<c10d::Work> ProcessGroup::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                  std::vector<at::Tensor>& inputs,
                                                  const c10d::AllgatherOptions& options) {
  constexpr auto kName = "all_gather";
  const at::Tensor& input = onlyTensor(kName, inputs);
  const auto& output = onlyList(kName, outputs, true, "output list");
  requireDense(kName, input);
  requireList(kName, output, static_cast<size_t>(getSize()), input, "output list");
  for (const at::Tensor& tensor : output) requireWritable(kName, tensor);
  Work::Call call(c10d::OpType::ALLGATHER, "smddp:all_gather", inputs, outputs);
  if (sameSizes(output, input)) {
    auto request = gatherRequest(output, input, call.staging, options);
    return submit(std::move(call), std::move(request));
  }
  // Blocks of several sizes: one broadcast from each rank. All ranks have lists of the same sizes.
  call.staging.begin(*devices_, {Collective::Broadcast});
  const at::Tensor& own = output[static_cast<size_t>(getRank())];
  requireSameSizes(kName, {own}, input, "output list, at its own rank,");
  std::vector<Request> requests;
  for (Rank root = 0; root < getSize(); ++root) {
    const at::Tensor& block = output[static_cast<size_t>(root)];
    Request request = newRequest(Collective::Broadcast, options.timeout, options.asyncOp);
    request.root = root;
    request.partOf = engine::calls::PartOf::UnevenAllGather;
    request.output = {root == getRank() ? call.staging.placeCopied(input, own, Access::Send)
                                        : call.staging.toWrite(block)};
    request.bytes = numBytes(block);
    requests.push_back(std::move(request));
  }
  return submit(std::move(call), requests);
}

intrusive_ptr<c10d::Work> ProcessGroup::allgather_coalesced(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  constexpr auto kName = "all_gather_coalesced";
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == static_cast<size_t>(getSize()),
                    "smddp: ", kName,
                    ": needs at least one input, and one list of outputs per rank");
  for (const auto& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == inputs.size(), "smddp: ", kName, ": every list must have ",
                      inputs.size(), " outputs, one per input, got ", list.size());
  }
  Work::Call call(c10d::OpType::ALLGATHER_COALESCED, "smddp:all_gather", inputs, outputs);
  std::vector<Request> requests;
  for (size_t i = 0; i < inputs.size(); ++i) {
    requireDense(kName, inputs[i]);
    std::vector<at::Tensor> blocks;
    for (const auto& list : outputs) blocks.push_back(list[i]);
    requireList(kName, blocks, blocks.size(), inputs[i], "outputs of an input");
    requireSameSizes(kName, blocks, inputs[i], "outputs of an input");
    for (const at::Tensor& block : blocks) requireWritable(kName, block);
    requests.push_back(gatherRequest(blocks, inputs[i], call.staging, options));
  }
  return submit(std::move(call), requests);
}

Request ProcessGroup::gatherRequest(const char* name, const at::Tensor& output,
                                    const at::Tensor& input, Staging& staging,
                                    const c10d::AllgatherOptions& options) const {
  requireDense(name, input);
  requireWritable(name, output);
  requireMultiple(name, output, input, getSize(), "output", "input");
  return gatherRequest(output, input, staging, options);
}

// Into a tensor for each rank, or into one for all.
Request ProcessGroup::gatherRequest(at::TensorList outputs, const at::Tensor& input,
                                    Staging& staging, const c10d::AllgatherOptions& options) const {
  Request request = newRequest(Collective::AllGather, options.timeout, options.asyncOp);
  request.bytes = numBytes(input);
  staging.begin(*devices_, {Collective::AllGather});
  const int64_t count = input.numel();
  std::tie(request.input, request.output) =
      staging.placeBlocks({input, 0, count}, {outputs, getRank() * count, count});
  return request;
}

intrusive_ptr<c10d::Work> ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::AllgatherOptions& options) {
  Work::Call call(c10d::OpType::_ALLGATHER_BASE, "smddp:all_gather", {input}, {{output}});
  Request request = gatherRequest("all_gather_into_tensor", output, input, call.staging, options);
  return submit(std::move(call), std::move(request));
}

intrusive_ptr<c10d::Work> ProcessGroup::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  constexpr auto kName = "all_gather_into_tensor_coalesced";
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(), "smddp: ", kName,
                    ": needs as many outputs as inputs, and at least one");
  Work::Call call(c10d::OpType::COALESCED, "smddp:all_gather", inputs, {outputs});
  std::vector<Request> requests;
  for (size_t i = 0; i < inputs.size(); ++i) {
    requests.push_back(gatherRequest(kName, outputs[i], inputs[i], call.staging, options));
  }
  return submit(std::move(call), requests);
}

intrusive_ptr<c10d::Work> ProcessGroup::reduce_scatter(std::vector<at::Tensor>& outputs,
                                                       std::vector<std::vector<at::Tensor>>& inputs,
                                                       const c10d::ReduceScatterOptions& options) {
  constexpr auto kName = "reduce_scatter";
  const at::Tensor& output = onlyTensor(kName, outputs);
  requireWritable(kName, output);
  const auto& input = onlyList(kName, inputs, true, "input list");
  requireList(kName, input, static_cast<size_t>(getSize()), output, "input list");
  Work::Call call(c10d::OpType::REDUCE_SCATTER, "smddp:reduce_scatter", input, {outputs});
  const bool even = sameSizes(input, output);
  Request request = newRequest(Collective::ReduceScatter, options.timeout, options.asyncOp);
  request.type = reducibleType(kName, output);
  setReduceOp(kName, options.reduceOp, request.type, request);
  call.staging.begin(*devices_,
                     {even ? Collective::ReduceScatter : Collective::Reduce, request.op});
  if (even) {
    request.input = call.staging.toRead(input);
    request.output = {call.staging.toWrite(output)};
    request.bytes = numBytes(output);
    addResidual(request, input);
    return submit(std::move(call), std::move(request));
  }
  // Blocks of several sizes: one reduction to each rank. All ranks have lists of the same sizes.
  const at::Tensor& own = input[static_cast<size_t>(getRank())];
  requireSameSizes(kName, {own}, output, "input list, at its own rank,");
  std::vector<Request> requests;
  for (Rank root = 0; root < getSize(); ++root) {
    const at::Tensor& block = input[static_cast<size_t>(root)];
    Request& one = requests.emplace_back(request);
    one.collective = Collective::Reduce;
    one.root = root;
    one.partOf = engine::calls::PartOf::UnevenReduceScatter;
    one.bytes = numBytes(block);
    addResidual(one, block);
    if (root != getRank()) one.input = {call.staging.toRead(block)};
  }
  // Comes last, because it writes to `output`, which may share memory with a block.
  requests[static_cast<size_t>(getRank())].output = {
      call.staging.placeCopied(own, output, Access::Read)};
  return submit(std::move(call), requests);
}

Request ProcessGroup::scatterRequest(const char* name, const at::Tensor& output,
                                     const at::Tensor& input, Staging& staging,
                                     const c10d::ReduceScatterOptions& options) {
  requireDense(name, input);
  requireWritable(name, output);
  requireMultiple(name, input, output, getSize(), "input", "output");
  Request request = newRequest(Collective::ReduceScatter, options.timeout, options.asyncOp);
  request.type = reducibleType(name, output);
  setReduceOp(name, options.reduceOp, request.type, request);
  staging.begin(*devices_, {Collective::ReduceScatter, request.op});
  request.input = {staging.toRead(input)};
  request.output = {staging.toWrite(output)};
  request.bytes = numBytes(output);
  addResidual(request, input);
  return request;
}

intrusive_ptr<c10d::Work> ProcessGroup::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Work::Call call(c10d::OpType::_REDUCE_SCATTER_BASE, "smddp:reduce_scatter", {input}, {{output}});
  Request request = scatterRequest("reduce_scatter_tensor", output, input, call.staging, options);
  return submit(std::move(call), std::move(request));
}

intrusive_ptr<c10d::Work> ProcessGroup::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& options) {
  constexpr auto kName = "reduce_scatter_tensor_coalesced";
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(), "smddp: ", kName,
                    ": needs as many outputs as inputs, and at least one");
  Work::Call call(c10d::OpType::COALESCED, "smddp:reduce_scatter", inputs, {outputs});
  std::vector<Request> requests;
  for (size_t i = 0; i < inputs.size(); ++i) {
    requests.push_back(scatterRequest(kName, outputs[i], inputs[i], call.staging, options));
  }
  return submit(std::move(call), requests);
}

intrusive_ptr<c10d::Work> ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  devices_->synchronize();
  Request request = newRequest(Collective::Barrier, options.timeout, options.asyncOp);
  return submit(Work::Call(c10d::OpType::BARRIER, "smddp:barrier", {}, {}), std::move(request));
}

}  // namespace smddp::process_group
