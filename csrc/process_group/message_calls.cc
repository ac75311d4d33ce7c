// Send and recv, and the calls that are made of them.
#include <ATen/core/LegacyTypeDispatch.h>

#include "process_group/checks.h"
#include "process_group/errors.h"
#include "process_group/process_group.h"
#include "process_group/sparse_sum.h"
#include "process_group/tags.h"

namespace smddp::process_group {

using c10::intrusive_ptr;

namespace {

void requireTag(OpName op, int tag) {
  TORCH_CHECK_VALUE(tag >= 0, "smddp: ", op, ": a tag must not be negative, got ", tag);
}

// Parts of a run of bytes, of so many elements each.
engine::Pieces cut(const engine::Piece& bytes, const std::vector<int64_t>& elements,
                   size_t elementSize) {
  engine::Pieces pieces;
  size_t begin = 0;
  for (const int64_t count : elements) {
    const size_t length = static_cast<size_t>(count) * elementSize;
    pieces.push_back(bytes.part(begin, length));
    begin += length;
  }
  return pieces;
}

// The same as tensors.
std::vector<at::Tensor> parts(const at::Tensor& tensor, const std::vector<int64_t>& elements) {
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  return tensor.view(-1).split_with_sizes(elements);
}

// Pieces of a list of tensors, one for each where they have been joined.
engine::Pieces blocks(engine::Pieces pieces, const std::vector<at::Tensor>& tensors) {
  if (pieces.size() == tensors.size()) return pieces;
  std::vector<int64_t> elements;
  for (const at::Tensor& tensor : tensors) elements.push_back(tensor.numel());
  return cut(pieces.front(), elements, tensors.front().itemsize());
}

}  // namespace

intrusive_ptr<c10d::Work> ProcessGroup::send(std::vector<at::Tensor>& tensors, int destination,
                                             int tag) {
  constexpr auto kName = "send";
  const at::Tensor& tensor = onlyTensor(kName, tensors);
  requireRank(kName, destination, getSize(), "destination");
  requireTag(kName, tag);
  requireDense(kName, tensor);
  Work::Call call(c10d::OpType::SEND, "smddp:send", tensors, {tensors});
  const auto& topology = group()->topology();
  const bool isDirect = topology.nodeOf(static_cast<Rank>(destination)) != topology.myNode() &&
                        leavesDevice(tensor, {});
  auto message =
      newMessage(true, destination, tag,
                 {isDirect ? call.staging.readInPlace(tensor) : call.staging.read(tensor)});
  return submit(std::move(call), {}, {std::move(message)});
}

intrusive_ptr<c10d::Work> ProcessGroup::recv(std::vector<at::Tensor>& tensors, int source,
                                             int tag) {
  constexpr auto kName = "recv";
  const at::Tensor& tensor = onlyTensor(kName, tensors);
  requireRank(kName, source, getSize(), "source");
  requireTag(kName, tag);
  requireWritable(kName, tensor);
  Work::Call call(c10d::OpType::RECV, "smddp:recv", tensors, {tensors});
  auto message = newMessage(false, source, tag, {call.staging.write(tensor)});
  return submit(std::move(call), {}, {std::move(message)});
}

intrusive_ptr<c10d::Work> ProcessGroup::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  constexpr auto kName = "recv";
  const at::Tensor& tensor = onlyTensor(kName, tensors);
  requireTag(kName, tag);
  requireWritable(kName, tensor);
  Work::Call call(c10d::OpType::RECVANYSOURCE, "smddp:recvAnySource", tensors, {tensors});
  auto message = newMessage(false, engine::kAnySource, tag, {call.staging.write(tensor)});
  return submit(std::move(call), {}, {std::move(message)});
}

engine::Message ProcessGroup::newMessage(bool send, Rank peer, int32_t tag, engine::Pieces buffer,
                                         std::chrono::milliseconds timeout) const {
  engine::Message message;
  message.send = send;
  message.peer = peer;
  message.tag = tag;
  message.buffer = std::move(buffer);
  message.timeout = nanoseconds(timeout);
  return message;
}

// Ranks exchange blocks of which only sender and receiver know the size. On a device that is one operation. Else they
// are messages, beside which goes a barrier's plan with the fingerprint of this call, so that a rank in another one is
// found out at once.
intrusive_ptr<Work> ProcessGroup::exchange(Work::Call call, const engine::Pieces& to,
                                           const engine::Pieces& from,
                                           const c10d::AllToAllOptions& options) {
  if (call.staging.staysOnDevice()) {
    auto request = newRequest(collectives::Collective::AllToAll, options.timeout, options.asyncOp);
    request.input = to;
    request.output = from;
    return submit(std::move(call), std::move(request));
  }
  auto agreement = newRequest(collectives::Collective::Barrier, options.timeout, /*asyncOp=*/true);
  agreement.agreement = engine::Agreement::AllToAllWithSplits;
  call.sequence = ++sequence_;
  const int32_t tag = tagOfCall(call.sequence);
  std::vector<engine::Message> messages;
  // What a rank gives itself may be there already.
  const auto& kept = to[static_cast<size_t>(getRank())];
  const auto& got = from[static_cast<size_t>(getRank())];
  const bool isInPlace = kept.data() == got.data() && kept.size() == got.size();
  // Receives first, and everybody begins with another peer.
  for (const bool send : {false, true}) {
    for (int i = 0; i < getSize(); ++i) {
      const Rank peer =
          send ? (getRank() + i) % getSize() : (getRank() - i + getSize()) % getSize();
      const auto& piece = (send ? to : from)[static_cast<size_t>(peer)];
      if (peer == getRank() && isInPlace) continue;
      messages.push_back(newMessage(send, peer, tag, {piece}, options.timeout));
    }
  }
  return submit(std::move(call), {std::move(agreement)}, std::move(messages));
}

intrusive_ptr<c10d::Work> ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                      std::vector<int64_t>& outputSplits,
                                                      std::vector<int64_t>& inputSplits,
                                                      const c10d::AllToAllOptions& options) {
  constexpr auto kName = "all_to_all_single";
  requireDense(kName, input);
  requireWritable(kName, output);
  requireSameType(kName, output, input);
  const auto to = elementsPerRank(kName, input, inputSplits, getSize(), "input");
  const auto from = elementsPerRank(kName, output, outputSplits, getSize(), "output");
  Work::Call call(c10d::OpType::ALLTOALL_BASE, "smddp:all_to_all", {input}, {{output}});
  chooseStaging(call.staging, collectives::Collective::AllToAll, input);
  const auto me = static_cast<size_t>(getRank());
  // Who gives no splits says that all blocks are equal. Who gives some knows only its own.
  const bool isEven = inputSplits.empty() && outputSplits.empty();
  if (isEven) requireMultiple(kName, output, input, 1, "output", "input");
  const bool isDirect = to[me] == from[me] && sendsFromDevice(call.staging, input, output);
  if (isEven) {
    auto request = newRequest(collectives::Collective::AllToAll, options.timeout, options.asyncOp);
    request.bytes = numBytes(input) / getSize();
    if (isDirect) {
      request.input = {call.staging.readInPlace(input)};
      request.output = call.staging.writeAround(output, getRank() * from[me], parts(input, to)[me]);
    } else {
      request.input = {call.staging.read(input)};
      request.output = {call.staging.write(output)};
    }
    return submit(std::move(call), std::move(request));
  }
  if (isDirect) {
    const auto sent = cut(call.staging.readInPlace(input), to, input.itemsize());
    const auto blocks = call.staging.writeAround(parts(output, from), me, parts(input, to)[me]);
    return exchange(std::move(call), sent, blocks, options);
  }
  const auto source = call.staging.read(input);
  const auto destination = call.staging.write(output);
  const auto sent = cut(source, to, input.itemsize());
  return exchange(std::move(call), sent, cut(destination, from, output.itemsize()), options);
}

intrusive_ptr<c10d::Work> ProcessGroup::alltoall(std::vector<at::Tensor>& outputs,
                                                 std::vector<at::Tensor>& inputs,
                                                 const c10d::AllToAllOptions& options) {
  constexpr auto kName = "all_to_all";
  const auto size = static_cast<size_t>(getSize());
  TORCH_CHECK_VALUE(inputs.size() == size && outputs.size() == size, "smddp: ", kName,
                    ": needs one input and one output per rank (", size, "), got ", inputs.size(),
                    " and ", outputs.size());
  requireList(kName, inputs, size, inputs.front(), "input list");
  requireList(kName, outputs, size, inputs.front(), "output list");
  for (const at::Tensor& tensor : outputs) requireWritable(kName, tensor);
  Work::Call call(c10d::OpType::ALLTOALL, "smddp:all_to_all", inputs, {outputs});
  chooseStaging(call.staging, collectives::Collective::AllToAll, inputs.front());
  const auto me = static_cast<size_t>(getRank());
  if (inputs[me].numel() == outputs[me].numel() && sendsFromDevice(call.staging, inputs)) {
    const auto sent = call.staging.readInPlace(inputs);
    const auto received = call.staging.writeAround(outputs, me, inputs[me]);
    return exchange(std::move(call), sent, received, options);
  }
  const auto sent = blocks(call.staging.read(inputs), inputs);
  return exchange(std::move(call), sent, blocks(call.staging.write(outputs), outputs), options);
}

intrusive_ptr<c10d::Work> ProcessGroup::allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                         const c10d::AllreduceOptions& options) {
  constexpr auto kName = "all_reduce";
  const at::Tensor& tensor = onlyTensor(kName, tensors);
  TORCH_CHECK_VALUE(tensor.layout() == c10::kSparse && tensor.device().is_cpu(), "smddp: ", kName,
                    ": expects a sparse COO tensor on the CPU, got layout ", tensor.layout(),
                    " on ", tensor.device());
  TORCH_CHECK_VALUE(options.reduceOp == c10d::ReduceOp::SUM, "smddp: ", kName,
                    ": sparse tensors can only be summed");
  // It begins here and now, on all ranks.
  deferred_.drain();
  const uint64_t sequence = ++sequence_;
  auto sum = std::make_shared<SparseSum>(engine_, group(), tensor, tagOfCall(sequence),
                                         nanoseconds(options.timeout));
  Work::Call call(c10d::OpType::ALLREDUCE, "smddp:sparse_all_reduce", tensors, {tensors});
  call.sequence = sequence;
  auto work = c10::make_intrusive<Work>(getRank(), engine_, group(), std::move(call));
  translated([&] { work->start({sum->begin()}); });
  record(work);
  return work;
}

}  // namespace smddp::process_group
