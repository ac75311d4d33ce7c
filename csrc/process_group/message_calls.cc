// Send and recv, and the collectives that are made of messages.
#include <numeric>

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

// Divides pieces into runs of so many elements each. Each run lies within one piece. Example: one piece of 12 elements
// and {4, 8} give two runs; pieces of 4 and 8 elements give the same.
engine::calls::Pieces cut(const engine::calls::Pieces& pieces, const std::vector<int64_t>& elements,
                          size_t elementSize) {
  engine::calls::Pieces runs;
  size_t piece = 0, offset = 0;
  for (const int64_t count : elements) {
    const size_t length = static_cast<size_t>(count) * elementSize;
    while (length > 0 && offset == pieces[piece].size()) {
      ++piece;
      offset = 0;
    }
    runs.push_back(pieces[piece].part(offset, length));
    offset += length;
  }
  return runs;
}

std::vector<int64_t> elementsOf(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> elements;
  for (const at::Tensor& tensor : tensors) elements.push_back(tensor.numel());
  return elements;
}

Blocks blocksOf(at::TensorList tensors, const std::vector<int64_t>& elements, int rank) {
  return {tensors, std::accumulate(elements.begin(), elements.begin() + rank, int64_t{0}),
          elements[static_cast<size_t>(rank)]};
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
  call.staging.begin(*devices_, CallKind::send(destination));
  auto message = newMessage(true, destination, tag, {call.staging.toSend(tensor)});
  return submit(std::move(call), std::move(message));
}

intrusive_ptr<c10d::Work> ProcessGroup::recv(std::vector<at::Tensor>& tensors, int source,
                                             int tag) {
  constexpr auto kName = "recv";
  const at::Tensor& tensor = onlyTensor(kName, tensors);
  requireRank(kName, source, getSize(), "source");
  requireTag(kName, tag);
  requireWritable(kName, tensor);
  Work::Call call(c10d::OpType::RECV, "smddp:recv", tensors, {tensors});
  call.staging.begin(*devices_, CallKind::receive());
  auto message = newMessage(false, source, tag, {call.staging.toWrite(tensor)});
  return submit(std::move(call), std::move(message));
}

intrusive_ptr<c10d::Work> ProcessGroup::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  constexpr auto kName = "recv";
  const at::Tensor& tensor = onlyTensor(kName, tensors);
  requireTag(kName, tag);
  requireWritable(kName, tensor);
  Work::Call call(c10d::OpType::RECVANYSOURCE, "smddp:recvAnySource", tensors, {tensors});
  call.staging.begin(*devices_, CallKind::receive());
  auto message = newMessage(false, engine::calls::kAnySource, tag, {call.staging.toWrite(tensor)});
  return submit(std::move(call), std::move(message));
}

engine::calls::Message ProcessGroup::newMessage(bool send, Rank rank, int32_t tag,
                                                engine::calls::Pieces buffer,
                                                std::chrono::milliseconds timeout) const {
  engine::calls::Message message;
  message.send = send;
  message.peer = rank;
  message.tag = tag;
  message.buffer = std::move(buffer);
  message.timeout = effectiveTimeout(timeout);
  return message;
}

// No plan has such blocks: they are messages. A barrier's plan with the fingerprint of this call runs beside them, so
// that a rank in another call is found at once.
intrusive_ptr<Work> ProcessGroup::exchange(Work::Call call, engine::calls::Pieces sent,
                                           engine::calls::Pieces received,
                                           const c10d::AllToAllOptions& options) {
  if (call.staging.takesSplits()) {
    auto request = newRequest(collectives::Collective::AllToAll, options.timeout, options.asyncOp);
    request.input = std::move(sent);
    request.output = std::move(received);
    return submit(std::move(call), std::move(request));
  }
  auto agreement = newRequest(collectives::Collective::Barrier, options.timeout, /*asyncOp=*/true);
  agreement.partOf = engine::calls::PartOf::AllToAllWithSplits;
  call.order = order();
  call.sequence = ++call.order->sequence;
  const int32_t tag = tagOfCall(call.sequence);
  std::vector<engine::calls::Message> messages;
  // This rank's own block may already be where it belongs.
  const auto& given = sent[static_cast<size_t>(getRank())];
  const auto& taken = received[static_cast<size_t>(getRank())];
  const bool isInPlace = given.data() == taken.data() && given.size() == taken.size();
  // Receives first. Each rank begins with another peer, so that not all send to one rank at once.
  for (const bool send : {false, true}) {
    for (int i = 0; i < getSize(); ++i) {
      const Rank peer =
          send ? (getRank() + i) % getSize() : (getRank() - i + getSize()) % getSize();
      const auto& piece = (send ? sent : received)[static_cast<size_t>(peer)];
      if (peer == getRank() && isInPlace) continue;
      messages.push_back(newMessage(send, peer, tag, {piece}, options.timeout));
    }
  }
  auto work = submit(std::move(call), {&agreement, 1}, messages);
  noteOpen(*work);
  return work;
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
  call.inputSplits = inputSplits;
  call.outputSplits = outputSplits;
  // Without splits all blocks are equal. With splits a rank knows only the sizes of its own blocks.
  const bool isEven = inputSplits.empty() && outputSplits.empty();
  if (isEven) requireMultiple(kName, output, input, 1, "output", "input");
  call.staging.begin(*devices_, {collectives::Collective::AllToAll});
  auto [sent, received] =
      call.staging.placeBlocks(blocksOf(input, to, getRank()), blocksOf(output, from, getRank()));
  if (isEven) {
    auto request = newRequest(collectives::Collective::AllToAll, options.timeout, options.asyncOp);
    request.bytes = numBytes(input) / getSize();
    request.input = std::move(sent);
    request.output = std::move(received);
    return submit(std::move(call), std::move(request));
  }
  return exchange(std::move(call), cut(sent, to, input.itemsize()),
                  cut(received, from, output.itemsize()), options);
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
  const auto to = elementsOf(inputs), from = elementsOf(outputs);
  call.staging.begin(*devices_, {collectives::Collective::AllToAll});
  const auto [sent, received] =
      call.staging.placeBlocks(blocksOf(inputs, to, getRank()), blocksOf(outputs, from, getRank()));
  const size_t itemSize = inputs.front().itemsize();
  return exchange(std::move(call), cut(sent, to, itemSize), cut(received, from, itemSize), options);
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
  reducibleType(kName, tensor);
  TORCH_CHECK_TYPE(tensor.scalar_type() != at::kBool, "smddp: ", kName,
                   ": torch cannot add sparse tensors of bool");
  // The sum begins at once, so calls that are deferred have to begin before.
  devices_->drain();
  Work::Call call(c10d::OpType::ALLREDUCE, "smddp:sparse_all_reduce", tensors, {tensors});
  call.order = order();
  call.sequence = ++call.order->sequence;
  call.hooks = hooks_;
  const auto target = call.order->group;
  auto sum = std::make_shared<SparseSum>(engine_, target, tensor, tagOfCall(call.sequence),
                                         effectiveTimeout(options.timeout));
  auto work = c10::make_intrusive<Work>(getRank(), engine_, target, std::move(call));
  translated([&] { work->setOperations({sum->begin()}); });
  noteOpen(*work);
  noteCoalesced(work);
  return work;
}

}  // namespace smddp::process_group
