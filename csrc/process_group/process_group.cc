#include "process_group/process_group.h"

#include <algorithm>

#include "common/config.h"
#include "common/log.h"
#include "process_group/checks.h"
#include "process_group/errors.h"
#include "process_group/store_adapter.h"

namespace smddp::process_group {
namespace {

using c10::intrusive_ptr;
using collectives::Collective;
using engine::Request;

// Leaked on purpose: see sharedEngine().
struct EngineSlot {
  std::mutex mutex;
  std::shared_ptr<engine::Engine> engine;
};
EngineSlot& engineSlot() {
  static auto* slot = new EngineSlot;
  return *slot;
}

// Tensors that an operation reads or writes after the call that started it has returned.
std::shared_ptr<void> keepAlive(const Work::Call& call) {
  return std::make_shared<std::pair<std::vector<at::Tensor>, std::vector<std::vector<at::Tensor>>>>(
      call.inputs, call.outputs);
}

engine::Pieces piecesOf(const std::vector<at::Tensor>& tensors) {
  engine::Pieces pieces;
  pieces.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) pieces.push_back(bytesOf(tensor));
  return pieces;
}

}  // namespace

std::shared_ptr<engine::Engine> sharedEngine() {
  EngineSlot& slot = engineSlot();
  const std::lock_guard lock(slot.mutex);
  if (!slot.engine) slot.engine = std::make_shared<engine::Engine>(engine::Engine::Options{});
  return slot.engine;
}

void shutdownEngine() {
  EngineSlot& slot = engineSlot();
  const std::lock_guard lock(slot.mutex);
  if (slot.engine) slot.engine->shutdown();
}

at::Tensor emptyTensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) {
    notImplemented("communication memory", c10::str("on ", options.device()));
  }
  const auto memory = sharedEngine()->process().sharedCommMemory();
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) *
                     c10::elementSize(c10::typeMetaToScalarType(options.dtype()));
  try {
    void* block = memory->allocate(std::max<size_t>(bytes, 1));
    return at::from_blob(
        block, sizes, [memory](void* freed) { memory->free(freed); }, options);
  } catch (const Error& error) {
    TORCH_WARN_ONCE("smddp: no communication memory, ordinary memory is used instead (slower): ",
                    error.what());
    return at::empty(sizes, options);
  }
}

ProcessGroup::ProcessGroup(const intrusive_ptr<c10d::Store>& store, int rank, int size,
                           std::chrono::milliseconds timeout, const std::string& name)
    : Backend(rank, size), engine_(sharedEngine()), timeoutMs_(timeout.count()) {
  if (name == "default_pg" || name.empty() || name == "0") setLogRank(rank);
  StoreAdapter adapter(store);
  translated([&] {
    group_ = engine_->createGroup(adapter, {name, rank, size},
                                  std::chrono::nanoseconds(timeout).count());
  });
  init();
}

ProcessGroup::~ProcessGroup() {
  try {
    shutdown();
  } catch (const std::exception& error) {
    SMDDP_LOG(Debug, "process_group", "while the group ended: {}", error.what());
  }
}

intrusive_ptr<c10d::Backend::Options> ProcessGroup::getBackendOptions() {
  return c10::make_intrusive<Options>(std::chrono::milliseconds(timeoutMs_.load()));
}

void ProcessGroup::setTimeout(std::chrono::milliseconds timeout) { timeoutMs_ = timeout.count(); }

c10d::ErrorType ProcessGroup::getError() {
  if (shutDown_) return c10d::ErrorType::SUCCESS;
  std::optional<Error> error;
  engine_->call([&] {
    if (const Error* found = group_->error()) error = *found;
  });
  if (!error) return c10d::ErrorType::SUCCESS;
  return error->kind() == ErrorKind::Timeout    ? c10d::ErrorType::TIMEOUT
         : error->kind() == ErrorKind::PeerLost ? c10d::ErrorType::REMOTE_ERROR
                                                : c10d::ErrorType::COMM_ERROR;
}

void ProcessGroup::abort() {
  if (shutDown_) return;
  engine_->abort(*group_, fmt::format("rank {} called abort()", getRank()));
}

void ProcessGroup::shutdown() {
  if (shutDown_.exchange(true)) return;
  engine_->destroyGroup(group_);
}

std::shared_ptr<engine::Group> ProcessGroup::group() const {
  if (shutDown_) {
    throw std::invalid_argument("smddp: this process group has been destroyed");
  }
  return group_;
}

Request ProcessGroup::newRequest(Collective collective, std::chrono::milliseconds timeout,
                                 bool asyncOp) const {
  Request request;
  request.collective = collective;
  const int64_t milliseconds = timeout == c10d::kUnsetTimeout ? timeoutMs_.load() : timeout.count();
  request.timeout = std::chrono::nanoseconds(std::chrono::milliseconds(milliseconds)).count();
  request.willWait = !asyncOp;
  return request;
}

intrusive_ptr<Work> ProcessGroup::submit(Work::Call call, std::vector<Request> requests) {
  const auto target = group();
  call.sequence = ++sequence_;
  const bool willWait = std::all_of(requests.begin(), requests.end(),
                                    [](const Request& request) { return request.willWait; });
  std::shared_ptr<void> tensors = willWait ? nullptr : keepAlive(call);
  auto work = c10::make_intrusive<Work>(getRank(), engine_, target, std::move(call));
  std::vector<engine::CompletionPtr> completions;
  completions.reserve(requests.size());
  translated([&] {
    for (Request& request : requests) {
      request.keepAlive = tensors;
      // The last one is waited for, with those before it in flight.
      request.willWait = willWait && &request == &requests.back();
      completions.push_back(engine_->submit(*target, std::move(request)));
    }
  });
  work->start(std::move(completions));
  return work;
}

intrusive_ptr<c10d::Work> ProcessGroup::broadcast(std::vector<at::Tensor>& tensors,
                                                  const c10d::BroadcastOptions& options) {
  constexpr auto kName = "broadcast";
  const at::Tensor& tensor = onlyTensor(kName, tensors);
  requireDense(kName, tensor);
  requireRank(kName, options.rootRank, getSize(), "source");
  Request request = newRequest(Collective::Broadcast, options.timeout, options.asyncOp);
  request.root = static_cast<Rank>(options.rootRank);
  request.output = {bytesOf(tensor)};
  request.bytes = static_cast<int64_t>(tensor.nbytes());
  return submit({c10d::OpType::BROADCAST, "smddp:broadcast", 0, tensors, {tensors}},
                {std::move(request)});
}

intrusive_ptr<c10d::Work> ProcessGroup::allreduce(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& options) {
  constexpr auto kName = "all_reduce";
  const at::Tensor& tensor = onlyTensor(kName, tensors);
  requireDense(kName, tensor);
  Request request = newRequest(Collective::AllReduce, options.timeout, options.asyncOp);
  request.type = reducibleType(kName, tensor);
  setReduceOp(kName, options.reduceOp, request.type, request);
  request.output = {bytesOf(tensor)};
  request.bytes = static_cast<int64_t>(tensor.nbytes());
  return submit({c10d::OpType::ALLREDUCE, "smddp:all_reduce", 0, tensors, {tensors}},
                {std::move(request)});
}

intrusive_ptr<c10d::Work> ProcessGroup::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) {
  constexpr auto kName = "all_reduce_coalesced";
  if (tensors.empty()) throw std::invalid_argument("smddp: all_reduce_coalesced: no tensors");
  Request request = newRequest(Collective::AllReduce, options.timeout, options.asyncOp);
  request.type = reducibleType(kName, tensors.front());
  setReduceOp(kName, options.reduceOp, request.type, request);
  for (const at::Tensor& tensor : tensors) {
    requireDense(kName, tensor);
    requireSameType(kName, tensor, tensors.front());
    request.bytes += static_cast<int64_t>(tensor.nbytes());
  }
  request.output = piecesOf(tensors);
  return submit({c10d::OpType::ALLREDUCE_COALESCED, "smddp:all_reduce", 0, tensors, {tensors}},
                {std::move(request)});
}

intrusive_ptr<c10d::Work> ProcessGroup::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                  std::vector<at::Tensor>& inputs,
                                                  const c10d::AllgatherOptions& options) {
  constexpr auto kName = "all_gather";
  const at::Tensor& input = onlyTensor(kName, inputs);
  requireContiguous(kName, input);
  if (outputs.size() != 1)
    throw std::invalid_argument("smddp: all_gather: expects one output list");
  requireList(kName, outputs.front(), static_cast<size_t>(getSize()), input, "output list");
  Request request = newRequest(Collective::AllGather, options.timeout, options.asyncOp);
  request.input = {bytesOf(input)};
  request.output = piecesOf(outputs.front());
  request.bytes = static_cast<int64_t>(input.nbytes());
  return submit({c10d::OpType::ALLGATHER, "smddp:all_gather", 0, inputs, outputs},
                {std::move(request)});
}

Request ProcessGroup::gatherRequest(const char* name, const at::Tensor& output,
                                    const at::Tensor& input,
                                    const c10d::AllgatherOptions& options) const {
  requireContiguous(name, input);
  requireContiguous(name, output);
  requireMultiple(name, output, input, getSize(), "output", "input");
  Request request = newRequest(Collective::AllGather, options.timeout, options.asyncOp);
  request.input = {bytesOf(input)};
  request.output = {bytesOf(output)};
  request.bytes = static_cast<int64_t>(input.nbytes());
  return request;
}

intrusive_ptr<c10d::Work> ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::AllgatherOptions& options) {
  Request request = gatherRequest("all_gather_into_tensor", output, input, options);
  return submit({c10d::OpType::_ALLGATHER_BASE, "smddp:all_gather", 0, {input}, {{output}}},
                {std::move(request)});
}

intrusive_ptr<c10d::Work> ProcessGroup::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  constexpr auto kName = "all_gather_into_tensor_coalesced";
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(), "smddp: ", kName,
                    ": needs as many outputs as inputs, and at least one");
  std::vector<Request> requests;
  for (size_t i = 0; i < inputs.size(); ++i) {
    requests.push_back(gatherRequest(kName, outputs[i], inputs[i], options));
  }
  return submit({c10d::OpType::COALESCED, "smddp:all_gather", 0, inputs, {outputs}},
                std::move(requests));
}

intrusive_ptr<c10d::Work> ProcessGroup::reduce_scatter(std::vector<at::Tensor>& outputs,
                                                       std::vector<std::vector<at::Tensor>>& inputs,
                                                       const c10d::ReduceScatterOptions& options) {
  constexpr auto kName = "reduce_scatter";
  const at::Tensor& output = onlyTensor(kName, outputs);
  requireContiguous(kName, output);
  if (inputs.size() != 1) {
    throw std::invalid_argument("smddp: reduce_scatter: expects one input list");
  }
  requireList(kName, inputs.front(), static_cast<size_t>(getSize()), output, "input list");
  Request request = newRequest(Collective::ReduceScatter, options.timeout, options.asyncOp);
  request.type = reducibleType(kName, output);
  setReduceOp(kName, options.reduceOp, request.type, request);
  request.input = piecesOf(inputs.front());
  request.output = {bytesOf(output)};
  request.bytes = static_cast<int64_t>(output.nbytes());
  return submit(
      {c10d::OpType::REDUCE_SCATTER, "smddp:reduce_scatter", 0, inputs.front(), {outputs}},
      {std::move(request)});
}

Request ProcessGroup::scatterRequest(const char* name, const at::Tensor& output,
                                     const at::Tensor& input,
                                     const c10d::ReduceScatterOptions& options) const {
  requireContiguous(name, input);
  requireContiguous(name, output);
  requireMultiple(name, input, output, getSize(), "input", "output");
  Request request = newRequest(Collective::ReduceScatter, options.timeout, options.asyncOp);
  request.type = reducibleType(name, output);
  setReduceOp(name, options.reduceOp, request.type, request);
  request.input = {bytesOf(input)};
  request.output = {bytesOf(output)};
  request.bytes = static_cast<int64_t>(output.nbytes());
  return request;
}

intrusive_ptr<c10d::Work> ProcessGroup::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Request request = scatterRequest("reduce_scatter_tensor", output, input, options);
  return submit(
      {c10d::OpType::_REDUCE_SCATTER_BASE, "smddp:reduce_scatter", 0, {input}, {{output}}},
      {std::move(request)});
}

intrusive_ptr<c10d::Work> ProcessGroup::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& options) {
  constexpr auto kName = "reduce_scatter_tensor_coalesced";
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(), "smddp: ", kName,
                    ": needs as many outputs as inputs, and at least one");
  std::vector<Request> requests;
  for (size_t i = 0; i < inputs.size(); ++i) {
    requests.push_back(scatterRequest(kName, outputs[i], inputs[i], options));
  }
  return submit({c10d::OpType::COALESCED, "smddp:reduce_scatter", 0, inputs, {outputs}},
                std::move(requests));
}

intrusive_ptr<c10d::Work> ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  Request request = newRequest(Collective::Barrier, options.timeout, options.asyncOp);
  return submit({c10d::OpType::BARRIER, "smddp:barrier", 0, {}, {}}, {std::move(request)});
}

intrusive_ptr<Work> ProcessGroup::message(Work::Call call, const std::vector<at::Tensor>& tensors,
                                          engine::Message message) {
  const auto target = group();
  const at::Tensor& tensor = onlyTensor(call.title, tensors);
  requireContiguous(call.title, tensor);
  message.buffer = {bytesOf(tensor)};
  message.timeout = std::chrono::nanoseconds(std::chrono::milliseconds(timeoutMs_.load())).count();
  call.outputs = {tensors};
  message.keepAlive = keepAlive(call);
  auto work = c10::make_intrusive<Work>(getRank(), engine_, target, std::move(call));
  translated([&] { work->start({engine_->submit(*target, std::move(message))}); });
  return work;
}

intrusive_ptr<c10d::Work> ProcessGroup::send(std::vector<at::Tensor>& tensors, int destination,
                                             int tag) {
  requireRank("send", destination, getSize(), "destination");
  engine::Message message;
  message.send = true;
  message.peer = destination;
  message.tag = tag;
  return this->message({c10d::OpType::SEND, "smddp:send", 0, tensors, {}}, tensors,
                       std::move(message));
}

intrusive_ptr<c10d::Work> ProcessGroup::recv(std::vector<at::Tensor>& tensors, int source,
                                             int tag) {
  requireRank("recv", source, getSize(), "source");
  engine::Message message;
  message.peer = source;
  message.tag = tag;
  return this->message({c10d::OpType::RECV, "smddp:recv", 0, tensors, {}}, tensors,
                       std::move(message));
}

intrusive_ptr<c10d::Work> ProcessGroup::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  engine::Message message;
  message.peer = engine::kAnySource;
  message.tag = tag;
  return this->message({c10d::OpType::RECVANYSOURCE, "smddp:recvAnySource", 0, tensors, {}},
                       tensors, std::move(message));
}

intrusive_ptr<c10d::Work> ProcessGroup::allreduce_sparse(std::vector<at::Tensor>&,
                                                         const c10d::AllreduceOptions&) {
  notImplemented("all_reduce of sparse tensors");
}
intrusive_ptr<c10d::Work> ProcessGroup::reduce(std::vector<at::Tensor>&,
                                               const c10d::ReduceOptions&) {
  notImplemented("reduce");
}
intrusive_ptr<c10d::Work> ProcessGroup::allgather_coalesced(std::vector<std::vector<at::Tensor>>&,
                                                            std::vector<at::Tensor>&,
                                                            const c10d::AllgatherOptions&) {
  notImplemented("all_gather_coalesced");
}
intrusive_ptr<c10d::Work> ProcessGroup::gather(std::vector<std::vector<at::Tensor>>&,
                                               std::vector<at::Tensor>&,
                                               const c10d::GatherOptions&) {
  notImplemented("gather");
}
intrusive_ptr<c10d::Work> ProcessGroup::scatter(std::vector<at::Tensor>&,
                                                std::vector<std::vector<at::Tensor>>&,
                                                const c10d::ScatterOptions&) {
  notImplemented("scatter");
}
intrusive_ptr<c10d::Work> ProcessGroup::alltoall_base(at::Tensor&, at::Tensor&,
                                                      std::vector<int64_t>&, std::vector<int64_t>&,
                                                      const c10d::AllToAllOptions&) {
  notImplemented("all_to_all_single");
}
intrusive_ptr<c10d::Work> ProcessGroup::alltoall(std::vector<at::Tensor>&, std::vector<at::Tensor>&,
                                                 const c10d::AllToAllOptions&) {
  notImplemented("all_to_all");
}
void ProcessGroup::monitoredBarrier(const c10d::BarrierOptions&, bool) {
  notImplemented("monitored_barrier");
}

bool ProcessGroup::supportsTensorAlloc(c10::DeviceIndex device) {
  // DDP asks with the index of a CPU tensor's device.
  return settings().commMemory && device < 0;
}

at::Tensor ProcessGroup::allocateTensor(long size, at::TensorOptions options) {
  return emptyTensor({size}, options);
}

std::map<std::string, engine::AlgorithmUse> ProcessGroup::statistics() {
  std::map<std::string, engine::AlgorithmUse> result;
  engine_->call([&] { result = group_->statistics(); });
  return result;
}

std::string ProcessGroup::describe() {
  std::string text;
  engine_->call([&] {
    text = group_->describe();
    if (group_->spansNodes()) text += "; " + engine_->process().describeFabric();
  });
  return text;
}

}  // namespace smddp::process_group
