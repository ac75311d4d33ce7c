#include "process_group/device/gpu_memory_path.h"

#include <algorithm>
#include <future>

#include "common/config.h"
#include "common/log.h"
#include "cuda/library.h"
#include "cuda/shared_call.h"

namespace smddp::process_group::device {
namespace {

using engine::calls::Request;

template <typename T>
std::span<std::byte> asBytes(T* first, size_t count) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<std::byte*>(first), count * sizeof(T)};
}

// An all-gather of plain values between the hosts.
template <typename T>
Request exchangeOf(T& mine, std::vector<T>& all, Nanoseconds timeout) {
  Request request;
  request.collective = collectives::Collective::AllGather;
  request.bytes = sizeof(T);
  request.input = {asBytes(&mine, 1)};
  request.output = {asBytes(all.data(), all.size())};
  request.timeout = timeout;
  return request;
}

cuda::Operation operationOf(collectives::Collective collective) {
  using collectives::Collective;
  switch (collective) {
    case Collective::AllReduce: return cuda::Operation::AllReduce;
    case Collective::Reduce: return cuda::Operation::Reduce;
    case Collective::ReduceScatter: return cuda::Operation::ReduceScatter;
    case Collective::AllGather: return cuda::Operation::AllGather;
    case Collective::Gather: return cuda::Operation::Gather;
    case Collective::Broadcast: return cuda::Operation::Broadcast;
    case Collective::Scatter: return cuda::Operation::Scatter;
    case Collective::AllToAll: return cuda::Operation::AllToAll;
    case Collective::Barrier: break;
  }
  raise(ErrorKind::Internal, "{} does not run in the memory of a GPU", toString(collective));
}

cuda::Call callOf(const Request& request, const cuda::SharedGpu& gpu) {
  const auto operation = operationOf(request.collective);
  // In an all-to-all there is no size that all ranks agree on: two ranks agree on the size of their block.
  const int64_t bytes = operation == cuda::Operation::AllToAll ? 0 : request.bytes;
  return {operation,    request.type, request.op, request.factor,
          request.root, gpu.me(),     gpu.size(), static_cast<uint64_t>(bytes)};
}

// The beginning of the run of bytes that the pieces make, one behind the other; null where there are no bytes.
std::byte* beginOf(const engine::calls::Pieces& pieces) {
  if (engine::calls::totalBytes(pieces) == 0) return nullptr;
  std::byte* const begin = pieces.front().data();
  std::byte* end = begin;
  for (const auto& piece : pieces) {
    SMDDP_CHECK(piece.empty() || piece.data() == end, "a list of tensors in the memory of a GPU");
    end = piece.data() + piece.size();
  }
  return begin;
}

// The bytes of each rank's block. One piece holds equal blocks of all ranks.
std::array<uint64_t, cuda::kMaxSharing> blocksOf(const engine::calls::Pieces& pieces,
                                                 size_t ranks) {
  std::array<uint64_t, cuda::kMaxSharing> bytes{};
  for (size_t rank = 0; rank < ranks; ++rank) {
    bytes[rank] = pieces.size() == 1 ? pieces[0].size() / ranks : pieces[rank].size();
  }
  return bytes;
}

cuda::Buffers buffersOf(const Request& request, size_t ranks) {
  const engine::calls::Pieces& input = request.input.empty() ? request.output : request.input;
  const engine::calls::Pieces& output = request.output.empty() ? request.input : request.output;
  cuda::Buffers buffers{beginOf(input), beginOf(output), {}};
  if (request.collective == collectives::Collective::AllToAll) {
    buffers.splits = {blocksOf(input, ranks), blocksOf(output, ranks)};
  }
  return buffers;
}

class Turns final : public DeviceTurns,
                    public std::enable_shared_from_this<Turns>,
                    cuda::Stream,
                    cuda::Exchange {
 public:
  Turns(std::shared_ptr<GpuMemoryPath> path, const Request& request,
        std::shared_ptr<DeviceCopies> copies, CallMemoryPtr memory)
      : path_(std::move(path)),
        copies_(std::move(copies)),
        memory_(std::move(memory)),
        deadline_(Deadline::after(clock_, request.timeout)),
        handle_(copies_->stream().native_handle()),
        all_(static_cast<size_t>(path_->gpu().size())),
        call_(path_->gpu(), callOf(request, path_->gpu()), buffersOf(request, all_.size()), *this,
              *this) {}

  bool advance() override {
    if (call_.advance()) return true;
    // An exchange has its deadline in the engine.
    if (!exchange_ && deadline_.passed(clock_)) throwLate();
    return false;
  }

  void advanceToEnd() override {
    byCaller_ = true;
    while (!call_.advance()) {
      if (!copies_->awaitArrival(deadline_)) throwLate();
    }
    path_->engine().wait(*path_->group(), *exchange_);
    throwIfFailed();
    call_.end();
  }

  void atEnd(std::function<void(const std::optional<Error>&)> action) override {
    atEnd_ = std::move(action);
  }

  void giveUp(const Error& error) noexcept override {
    try {
      if (call_.isExposed()) {
        keepForGood(memory_);
        keepForGood(path_);
      }
      // The others wait for this rank, so they are told, unless it leaves. The engine has told them its own errors.
      if (!engineFailed_ && error.kind() != ErrorKind::Aborted) {
        path_->engine().fail(*path_->group(), error);
      }
    } catch (const std::exception& thrown) {
      SMDDP_LOG(Warn, "process_group", "while a call was given up: {}", thrown.what());
    }
  }

 private:
  void* handle() const override { return handle_; }
  void mark() override { copies_->mark(); }
  bool reached() const override { return copies_->arrived(); }

  void begin(const cuda::Descriptor& mine, bool last) override {
    mine_ = mine;
    Request request =
        exchangeOf(mine_, all_, std::max<Nanoseconds>(deadline_.at - clock_.now(), 1));
    request.keepAlive = shared_from_this();
    if (byCaller_) {
      request.willWait = true;
      exchange_ = path_->engine().submit(*path_->group(), std::move(request));
      return;
    }
    exchange_ = std::make_shared<engine::calls::Completion>();
    if (last) {
      exchange_->then([self = shared_from_this()] { self->onLastExchange(); });
    }
    // This is the thread of deferred calls, which must not run continuations.
    path_->engine().enqueue(*path_->group(), std::move(request), exchange_);
  }

  bool done() override {
    if (byCaller_) path_->engine().wait(*path_->group(), *exchange_);
    if (!exchange_->done()) return false;
    throwIfFailed();
    exchange_.reset();
    return true;
  }

  std::span<const cuda::Descriptor> all() const override { return all_; }

  void throwIfFailed() {
    if (!exchange_->error()) return;
    engineFailed_ = true;
    throw *exchange_->error();
  }

  [[noreturn]] void throwLate() const {
    raise(ErrorKind::Timeout,
          "the time-out passed before the device had come to this call, or had done this rank's "
          "part: what was queued "
          "before it on its stream still runs");
  }

  // The last exchange has ended.
  void onLastExchange() {
    const auto& error = exchange_->error();
    if (error) {
      engineFailed_ = true;
      giveUp(*error);
    } else {
      call_.end();
    }
    atEnd_(error);
  }

  const std::shared_ptr<GpuMemoryPath> path_;
  const std::shared_ptr<DeviceCopies> copies_;
  const CallMemoryPtr memory_;
  const MonotonicClock clock_;
  const Deadline deadline_;
  void* const handle_;
  bool byCaller_ = false;
  std::atomic<bool> engineFailed_{false};
  cuda::Descriptor mine_;
  std::vector<cuda::Descriptor> all_;
  engine::calls::CompletionPtr exchange_;  // under way, or the last
  std::function<void(const std::optional<Error>&)> atEnd_;
  cuda::SharedCall call_;
};

// Throws Transport where the CUDA part has no kernels for this GPU.
void requireKernels(const cuda::DeviceTable& table, c10::Device device) {
  const at::Tensor bytes = at::zeros({3}, at::TensorOptions(at::kByte).device(device));
  auto* const first = static_cast<std::byte*>(bytes.data_ptr());
  cuda::Job job;
  job.srcs[0] = first;
  job.numSrcs = 1;
  // With one destination the driver would copy, and no kernel would run.
  job.dsts[0] = first + 1;
  job.dsts[1] = first + 2;
  job.numDsts = 2;
  job.count = 1;
  cuda::check(table, table.run(device.index(), &job, currentStream(device).native_handle()),
              "a kernel");
}

}  // namespace

GpuMemoryPath::GpuMemoryPath(std::shared_ptr<engine::Engine> engine,
                             std::shared_ptr<engine::groups::Group> group, c10::Device device,
                             std::string library)
    : engine_(std::move(engine)),
      group_(std::move(group)),
      device_(device),
      library_(std::move(library)) {}

template <typename T>
std::vector<T> GpuMemoryPath::gather(const T& mine, Nanoseconds timeout) {
  struct Buffers {
    T mine;
    std::vector<T> all;
  };
  const auto buffers = std::make_shared<Buffers>(
      Buffers{mine, std::vector<T>(static_cast<size_t>(group_->spec.size))});
  Request request = exchangeOf(buffers->mine, buffers->all, timeout);
  request.keepAlive = buffers;
  const auto completion = std::make_shared<engine::calls::Completion>();
  const auto ended = std::make_shared<std::promise<void>>();
  completion->then([ended] { ended->set_value(); });
  engine_->enqueue(*group_, std::move(request), completion);
  ended->get_future().wait();
  if (completion->error()) throw *completion->error();
  return buffers->all;
}

std::string GpuMemoryPath::connect(Nanoseconds timeout) {
  const auto& spec = group_->spec;
  cuda::Introduction mine;
  try {
    gpu_ = std::make_unique<cuda::SharedGpu>(cuda::loadLibrary(library_), device_.index(), spec.me,
                                             spec.size, settings().poolBytes);
    mine = gpu_->introduce();
    if (mine.refusal.empty()) requireKernels(gpu_->table(), device_);
  } catch (const Error& error) {
    mine.refusal = cuda::ShortText(error.what());
  }
  const auto all = gather(mine, timeout);
  if (const std::string refusal = cuda::refusalOf(all); !refusal.empty()) return refusal;
  for (const auto& verdict : gather(cuda::ShortText(gpu_->connect(all)), timeout)) {
    if (!verdict.empty()) return verdict.string();
  }
  return "";
}

at::Tensor GpuMemoryPath::allocate(int64_t size, const at::TensorOptions& options) {
  const cuda::DeviceTable& table = gpu_->table();
  const int device = device_.index();
  const auto bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  void* memory = nullptr;
  cuda::check(table, table.allocate(device, std::max<size_t>(bytes, 1), &memory),
              "allocating communication memory");
  // Freeing waits for the GPU, and so for all that uses the memory.
  const auto free = [&table, device](void* freed) { table.free(device, freed); };
  return at::from_blob(memory, {size}, free, options.device(device_), device_);
}

std::shared_ptr<DeviceTurns> GpuMemoryPath::begin(const Request& request,
                                                  const std::shared_ptr<DeviceCopies>& copies,
                                                  CallMemoryPtr memory) {
  return std::make_shared<Turns>(shared_from_this(), request, copies, std::move(memory));
}

}  // namespace smddp::process_group::device
