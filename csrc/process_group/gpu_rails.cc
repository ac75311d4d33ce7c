#include "process_group/gpu_rails.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "common/config.h"
#include "common/log.h"

namespace smddp::process_group {
namespace {

at::ScalarType torchType(DataType type) {
  switch (type) {
    case DataType::uint8: return at::kByte;
    case DataType::int8: return at::kChar;
    case DataType::int32: return at::kInt;
    case DataType::int64: return at::kLong;
    case DataType::float16: return at::kHalf;
    case DataType::bfloat16: return at::kBFloat16;
    case DataType::float32: return at::kFloat;
    case DataType::float64: return at::kDouble;
    default: break;
  }
  raise(ErrorKind::Internal, "{} is not reduced by NCCL", toString(type));
}

// Averages are those of the node, then those of the nodes, which are of one size.
c10d::ReduceOp torchOp(ReduceOp op) {
  switch (op) {
    case ReduceOp::SUM: return c10d::ReduceOp::SUM;
    case ReduceOp::PRODUCT: return c10d::ReduceOp::PRODUCT;
    case ReduceOp::MIN: return c10d::ReduceOp::MIN;
    case ReduceOp::MAX: return c10d::ReduceOp::MAX;
    case ReduceOp::AVG: return c10d::ReduceOp::AVG;
    default: break;
  }
  raise(ErrorKind::Internal, "{} is not done by NCCL", toString(op));
}

}  // namespace

// One call.
class GpuRails::Turns final : public DeviceTurns, public std::enable_shared_from_this<Turns> {
 public:
  Turns(std::shared_ptr<GpuRails> rails, const engine::Request& request,
        std::shared_ptr<DeviceCopies> copies, std::shared_ptr<void> keepAlive)
      : rails_(std::move(rails)),
        copies_(std::move(copies)),
        keepAlive_(std::move(keepAlive)),
        op_(torchOp(request.op)),
        timeout_(std::chrono::duration_cast<std::chrono::milliseconds>(
            std::chrono::nanoseconds(request.timeout))),
        scatterStream_(c10::impl::VirtualGuardImpl(rails_->device_.type())
                           .getStreamFromGlobalPool(rails_->device_, /*isHighPriority=*/true)) {
    const auto& piece = request.output.front();
    const auto options = at::TensorOptions(torchType(request.type)).device(rails_->device_);
    const auto count = static_cast<int64_t>(piece.size() / sizeOf(request.type));
    if (count == 0) return;
    const at::Tensor vector = at::from_blob(
        piece.data(), {count}, [](void*) {}, options, rails_->device_);
    c10::Event now(rails_->device_.type());
    now.record(copies_->stream());
    now.block(scatterStream_);
    const int64_t share = settings().poolBytes / vector.element_size();
    const int64_t most = share * rails_->groups_.nodeSize;
    for (int64_t first = 0; first < count; first += most) {
      scatter(vector.narrow(0, first, std::min(most, count - first)));
    }
  }

  // All that follows is done by continuations of the rail.
  bool advance() override { return true; }

  void advanceToEnd() override {
    const auto done = std::make_shared<engine::Completion>();
    atEnd([engine = rails_->engine_, done](const std::optional<Error>& error) {
      engine->finish(*done, error);
    });
    rails_->engine_->wait(*done);
    if (done->error()) throw *done->error();
  }

  void atEnd(std::function<void(const std::optional<Error>&)> action) override {
    atEnd_ = std::move(action);
    {
      const std::lock_guard lock(rails_->mutex_);
      rails_->line_.push_back(shared_from_this());
    }
    for (const Chunk& chunk : chunks_) {
      for (const auto& completion : chunk.rail->completions()) {
        completion->then([rails = rails_] { rails->advanceLine(); });
      }
    }
    if (chunks_.empty()) rails_->advanceLine();
  }

  void giveUp(const Error& error) noexcept override {
    try {
      if (error.kind() != ErrorKind::Aborted) rails_->engine_->fail(*rails_->parent_, error);
    } catch (const std::exception& thrown) {
      SMDDP_LOG(Warn, "process_group", "while a call was given up: {}", thrown.what());
    }
  }

  // Enqueues the third stage of the chunks whose rail has ended; whether that was all. Throws the rail's error.
  bool gather() {
    for (; gathered_ < chunks_.size(); ++gathered_) {
      const Chunk& chunk = chunks_[gathered_];
      for (const auto& completion : chunk.rail->completions()) {
        if (!completion->done()) return false;
        if (completion->error()) throw *completion->error();
      }
      const c10::StreamGuard guard(copies_->stream());
      const at::AutoDispatchBelowADInplaceOrView noAutograd;
      chunk.rail->wait();
      at::Tensor whole = chunk.padded.defined() ? chunk.padded : chunk.part;
      at::Tensor share = chunk.share;
      c10d::AllgatherOptions options;
      options.timeout = timeout_;
      options.asyncOp = true;
      rails_->groups_.gather->_allgather_base(whole, share, options)->wait();
      for (const at::Tensor& used : {whole, share}) copies_->use(used);
      if (chunk.padded.defined()) {
        at::Tensor(chunk.part).copy_(whole.narrow(0, 0, chunk.part.numel()), /*non_blocking=*/true);
      }
    }
    return true;
  }

  void end(const std::optional<Error>& error) {
    if (error) {
      // Copies to the host may still be under way, whose calls have ended.
      keepForGood(shared_from_this());
      giveUp(*error);
    }
    if (atEnd_) std::exchange(atEnd_, nullptr)(error);
  }

 private:
  struct Chunk {
    at::Tensor part;    // of the vector
    at::Tensor padded;  // to a multiple of the node's ranks, where that is another tensor
    at::Tensor share;   // this rank's
    c10::intrusive_ptr<Work> rail;
  };

  void scatter(const at::Tensor& part) {
    const c10::StreamGuard guard(scatterStream_);
    const at::AutoDispatchBelowADInplaceOrView noAutograd;
    const auto ranks = static_cast<int64_t>(rails_->groups_.nodeSize);
    const int64_t share = (part.numel() + ranks - 1) / ranks;
    Chunk chunk{part, {}, at::empty({share}, part.options()), {}};
    if (share * ranks != part.numel()) {
      chunk.padded = at::empty({share * ranks}, part.options());
      chunk.padded.zero_();
      chunk.padded.narrow(0, 0, part.numel()).copy_(part, /*non_blocking=*/true);
    }
    at::Tensor whole = chunk.padded.defined() ? chunk.padded : part;
    c10d::ReduceScatterOptions options;
    options.reduceOp = op_;
    options.timeout = timeout_;
    options.asyncOp = true;
    rails_->groups_.scatter->_reduce_scatter_base(chunk.share, whole, options)->wait();
    c10d::AllreduceOptions between;
    between.reduceOp = op_;
    between.timeout = timeout_;
    between.asyncOp = true;
    std::vector<at::Tensor> shares{chunk.share};
    const auto rail = rails_->groups_.rail->allreduce(shares, between);
    chunk.rail = c10::intrusive_ptr<Work>::reclaim_copy(static_cast<Work*>(rail.get()));
    chunks_.push_back(std::move(chunk));
  }

  const std::shared_ptr<GpuRails> rails_;
  const std::shared_ptr<DeviceCopies> copies_;
  const std::shared_ptr<void> keepAlive_;
  const c10d::ReduceOp op_;
  const std::chrono::milliseconds timeout_;
  const c10::Stream scatterStream_;
  std::vector<Chunk> chunks_;
  size_t gathered_ = 0;  // of the thread in advanceLine()
  std::function<void(const std::optional<Error>&)> atEnd_;
};

GpuRails::GpuRails(std::shared_ptr<engine::Engine> engine, std::shared_ptr<engine::Group> parent,
                   c10::Device device, Groups groups)
    : engine_(std::move(engine)),
      parent_(std::move(parent)),
      device_(device),
      groups_(std::move(groups)) {}

std::shared_ptr<DeviceTurns> GpuRails::begin(const engine::Request& request,
                                             const std::shared_ptr<DeviceCopies>& copies,
                                             std::shared_ptr<void> keepAlive) {
  try {
    return std::make_shared<Turns>(shared_from_this(), request, copies, std::move(keepAlive));
  } catch (const std::exception& error) {
    // The other rails would wait for this rank.
    engine_->fail(*parent_, Error(ErrorKind::Transport, error.what()));
    throw;
  }
}

void GpuRails::advanceLine() {
  std::unique_lock lock(mutex_);
  again_ = true;
  if (busy_) return;
  busy_ = true;
  std::vector<std::pair<std::shared_ptr<Turns>, std::optional<Error>>> ended;
  while (std::exchange(again_, false)) {
    while (!line_.empty()) {
      const auto head = line_.front();
      lock.unlock();
      bool done = false;
      std::optional<Error> error;
      try {
        done = head->gather();
      } catch (const Error& thrown) {
        error = thrown;
      } catch (const std::exception& thrown) {
        error = Error(ErrorKind::Transport, thrown.what());
      }
      lock.lock();
      if (!done && !error) break;
      line_.pop_front();
      ended.emplace_back(head, error);
    }
  }
  busy_ = false;
  lock.unlock();
  // What this runs may make calls and wait for them.
  for (const auto& [turns, error] : ended) turns->end(error);
}

void GpuRails::abort() {
  groups_.scatter->abort();
  groups_.gather->abort();
  groups_.rail->abort();
}

void GpuRails::shutdown() {
  groups_.rail->shutdown();
  groups_.scatter->shutdown();
  groups_.gather->shutdown();
}

}  // namespace smddp::process_group
