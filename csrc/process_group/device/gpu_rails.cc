#include "process_group/device/gpu_rails.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "common/config.h"
#include "common/log.h"

namespace smddp::process_group::device {
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

// An average of the nodes' averages is that of all ranks, since nodes have equally many ranks.
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

// The bytes of a request as elements.
at::Tensor vectorOf(const engine::calls::Pieces& pieces, DataType type, c10::Device device) {
  const std::span<std::byte> bytes = pieces.front();
  const auto count = static_cast<int64_t>(bytes.size() / sizeOf(type));
  return at::from_blob(
      bytes.data(), {count}, [](void*) {}, at::TensorOptions(torchType(type)).device(device),
      device);
}

void enqueueCopy(const at::Tensor& from, at::Tensor into) {
  into.copy_(from, /*non_blocking=*/true);
}

}  // namespace

// One call.
class GpuRails::Turns final : public DeviceTurns, public std::enable_shared_from_this<Turns> {
 public:
  Turns(std::shared_ptr<GpuRails> rails, const engine::calls::Request& request,
        std::shared_ptr<DeviceCopies> copies, CallMemoryPtr memory)
      : rails_(std::move(rails)),
        topology_(rails_->parent_->membership.topology),
        copies_(std::move(copies)),
        memory_(std::move(memory)),
        timeout_(std::chrono::duration_cast<std::chrono::milliseconds>(
            std::chrono::nanoseconds(request.timeout))),
        firstStream_(c10::impl::VirtualGuardImpl(rails_->device_.type())
                         .getStreamFromGlobalPool(rails_->device_, /*isHighPriority=*/true)) {
    c10::Event now(rails_->device_.type());
    now.record(copies_->stream());
    now.block(firstStream_);
    begin(request);
  }

  // The continuations of the rail do the rest.
  bool advance() override { return true; }

  void advanceToEnd() override {
    const auto done = std::make_shared<engine::calls::Completion>();
    atEnd([engine = rails_->engine_, done](const std::optional<Error>& error) {
      engine->progress().complete(*done, error);
    });
    rails_->engine_->wait(*rails_->parent_, *done);
    if (done->error()) throw *done->error();
  }

  void atEnd(std::function<void(const std::optional<Error>&)> action) override {
    atEnd_ = std::move(action);
    // A copy: another thread may go on with the chunks as soon as the call is in the queue.
    std::vector<c10::intrusive_ptr<Work>> rails;
    for (const Chunk& chunk : chunks_) rails.push_back(chunk.rail);
    {
      const std::lock_guard lock(rails_->mutex_);
      rails_->queue_.push_back(shared_from_this());
    }
    for (const auto& rail : rails) advanceAfter(*rail);
    if (rails.empty()) rails_->advanceQueue();
  }

  void giveUp(const Error& error) noexcept override {
    try {
      if (error.kind() != ErrorKind::Aborted) rails_->fail(error);
    } catch (const std::exception& thrown) {
      SMDDP_LOG(Warn, "process_group", "while a call was given up: {}", thrown.what());
    }
  }

  // Enqueues what follows the rail, for the chunks whose rail has ended. True when nothing is left to enqueue. Throws
  // the rail's error.
  bool goOn() {
    const c10::StreamGuard guard(copies_->stream());
    const at::AutoDispatchBelowADInplaceOrView noAutograd;
    for (; ended_ < chunks_.size(); ++ended_) {
      const Chunk& chunk = chunks_[ended_];
      if (!hasEnded(*chunk.rail)) return false;
      if (chunk.last) chunk.last();
    }
    return true;
  }

  void end(const std::optional<Error>& error) {
    if (!error) {
      if (atEnd_) std::exchange(atEnd_, nullptr)(error);
      return;
    }
    // Copies to the host may still be under way although the rail's calls have ended.
    keepForGood(shared_from_this());
    giveUp(*error);
    if (atEnd_) std::exchange(atEnd_, nullptr)(rails_->failure().value_or(*error));
  }

 private:
  struct Chunk {
    c10::intrusive_ptr<Work> rail;
    std::function<void()>
        last;  // enqueues the third stage on the current stream; empty: there is none
  };

  void advanceAfter(const Work& rail) const {
    for (const auto& completion : rail.completions()) {
      completion->then([rails = rails_] { rails->advanceQueue(); });
    }
  }

  // Whether the rail has ended. If so, the current stream waits for it.
  static bool hasEnded(Work& rail) {
    for (const auto& completion : rail.completions()) {
      if (!completion->done()) return false;
      if (completion->error()) throw *completion->error();
    }
    rail.wait();
    return true;
  }

  void begin(const engine::calls::Request& request) {
    using collectives::Collective;
    const c10::StreamGuard guard(firstStream_);
    const at::AutoDispatchBelowADInplaceOrView noAutograd;
    const bool hasBlocks = !request.input.empty();  // input or output has a block for each rank
    const at::Tensor output = vectorOf(request.output, request.type, rails_->device_);
    const at::Tensor input =
        hasBlocks ? vectorOf(request.input, request.type, rails_->device_) : output;
    // Elements of the vector, or of one block.
    const int64_t count = std::min(input.numel(), output.numel());
    // On each rank a share of a chunk crosses the host, or a block for each node: a chunk has `most` elements at most.
    const int64_t pool = settings().poolBytes / static_cast<int64_t>(sizeOf(request.type));
    const int64_t most = std::max<int64_t>(1, hasBlocks ? pool / nodes() : pool * locals());
    for (int64_t first = 0; first < count; first += most) {
      const auto part = [&](const at::Tensor& whole) {
        return whole.view({-1, count}).narrow(1, first, std::min(most, count - first));
      };
      switch (request.collective) {
        case Collective::AllReduce: reduceAll(part(output).view(-1), torchOp(request.op)); break;
        case Collective::ReduceScatter:
          reduceScatter(part(input), part(output).view(-1), torchOp(request.op));
          break;
        case Collective::AllGather: gatherAll(part(input).view(-1), part(output)); break;
        case Collective::Broadcast: broadcast(part(output).view(-1), request.root); break;
        default: raise(ErrorKind::Internal, "{} on rails", toString(request.collective));
      }
    }
  }

  // --- the collectives, as far as the rail -------------------------------------------------------

  void reduceAll(const at::Tensor& part, const c10d::ReduceOp& op) {
    at::Tensor whole = padded(part, locals());
    if (!whole.is_same(part)) {
      whole.zero_();
      enqueueCopy(part, whole.narrow(0, 0, part.numel()));
    }
    at::Tensor share = at::empty({whole.numel() / locals()}, part.options());
    reduceInNode(whole, share, op);
    auto options = optionsOf<c10d::AllreduceOptions>();
    options.reduceOp = op;
    std::vector<at::Tensor> shares{share};
    add(rail().allreduce(shares, options), [this, share, whole, part] {
      copies_->use(whole);
      gatherInNode(share, whole, part);
    });
  }

  void reduceScatter(const at::Tensor& blocks, at::Tensor output, const c10d::ReduceOp& op) {
    const at::Tensor ordered = at::empty({locals(), nodes(), output.numel()}, output.options());
    for (const auto& [theirs, ours] : paired(blocks, ordered)) enqueueCopy(theirs, ours);
    at::Tensor share = at::empty({nodes() * output.numel()}, output.options());
    reduceInNode(ordered.view(-1), share, op);
    auto options = optionsOf<c10d::ReduceScatterOptions>();
    options.reduceOp = op;
    add(rail()._reduce_scatter_base(output, share, options), nullptr);
  }

  void gatherAll(at::Tensor input, const at::Tensor& blocks) {
    at::Tensor share = at::empty({nodes() * input.numel()}, input.options());
    auto options = optionsOf<c10d::AllgatherOptions>();
    add(rail()._allgather_base(share, input, options), [this, share, blocks] {
      const at::Tensor ordered = at::empty({locals(), nodes(), blocks.size(1)}, share.options());
      gatherInNode(share, ordered.view(-1), ordered.view(-1));
      for (const auto& [theirs, ours] : paired(blocks, ordered)) enqueueCopy(ours, theirs);
    });
  }

  void broadcast(const at::Tensor& part, Rank root) {
    const at::Tensor whole = padded(part, locals());
    const int64_t count = whole.numel() / locals();
    const bool hasIt = topology_.nodeOf(root) == topology_.myNode();
    at::Tensor share;
    if (hasIt) {
      auto options = optionsOf<c10d::BroadcastOptions>();
      options.rootRank = topology_.localOf(root);
      std::vector<at::Tensor> tensors{part};
      rails_->groups_.scatter->backend().broadcast(tensors, options)->wait();
      if (!whole.is_same(part)) enqueueCopy(part, whole.narrow(0, 0, part.numel()));
      share = whole.narrow(0, topology_.myLocal() * count, count);
    } else {
      share = at::empty({count}, part.options());
    }
    auto options = optionsOf<c10d::BroadcastOptions>();
    options.rootRank = topology_.nodeOf(root);
    std::vector<at::Tensor> shares{share};
    const auto rails = rail().broadcast(shares, options);
    if (hasIt) return add(rails, nullptr);
    add(rails, [this, share, whole, part] {
      copies_->use(whole);
      gatherInNode(share, whole, part);
    });
  }

  // --- what they are made of ---------------------------------------------------------------------

  int64_t locals() const { return topology_.teamSize(); }
  int64_t nodes() const { return topology_.numNodes(); }
  ProcessGroup& rail() const { return *rails_->groups_.rail; }

  template <typename Options>
  Options optionsOf() const {
    Options options;
    options.timeout = timeout_;
    options.asyncOp = true;
    return options;
  }

  void add(const c10::intrusive_ptr<c10d::Work>& rail, std::function<void()> last) {
    chunks_.push_back(
        {c10::intrusive_ptr<Work>::reclaim_copy(static_cast<Work*>(rail.get())), std::move(last)});
  }

  // The part itself if its elements divide by `ways`; else a longer tensor whose elements do.
  static at::Tensor padded(const at::Tensor& part, int64_t ways) {
    const int64_t share = (part.numel() + ways - 1) / ways;
    return share * ways == part.numel() ? part : at::empty({share * ways}, part.options());
  }

  void reduceInNode(at::Tensor whole, at::Tensor share, const c10d::ReduceOp& op) {
    auto options = optionsOf<c10d::ReduceScatterOptions>();
    options.reduceOp = op;
    rails_->groups_.scatter->backend()._reduce_scatter_base(share, whole, options)->wait();
  }

  // `whole`: where it is gathered, which may be longer than `part`, where it belongs.
  void gatherInNode(at::Tensor share, at::Tensor whole, const at::Tensor& part) {
    copies_->use(share);
    auto options = optionsOf<c10d::AllgatherOptions>();
    rails_->groups_.gather->backend()._allgather_base(whole, share, options)->wait();
    if (!whole.is_same(part)) enqueueCopy(whole.narrow(0, 0, part.numel()), part);
  }

  // Pairs of blocks: in the order of ranks, and in the order of [local rank, node]. One pair for all blocks where
  // strides can say the order.
  std::vector<std::pair<at::Tensor, at::Tensor>> paired(const at::Tensor& blocks,
                                                        const at::Tensor& ordered) const {
    const Rank perNode = topology_.node(1)[0], perLocal = topology_.node(0)[1];
    std::vector<std::pair<at::Tensor, at::Tensor>> each;
    bool strided = true;
    for (Rank local = 0; local < locals(); ++local) {
      for (int node = 0; node < nodes(); ++node) {
        const Rank rank = topology_.node(node)[static_cast<size_t>(local)];
        strided = strided && rank == node * perNode + local * perLocal;
        each.emplace_back(blocks.select(0, rank), ordered.select(0, local).select(0, node));
      }
    }
    if (!strided) return each;
    const int64_t apart = blocks.stride(0);
    return {
        {blocks.as_strided(ordered.sizes(), {perLocal * apart, perNode * apart, blocks.stride(1)}),
         ordered}};
  }

  const std::shared_ptr<GpuRails> rails_;
  const plan::Topology& topology_;
  const std::shared_ptr<DeviceCopies> copies_;
  const CallMemoryPtr memory_;
  const std::chrono::milliseconds timeout_;
  const c10::Stream firstStream_;
  std::vector<Chunk> chunks_;
  size_t ended_ = 0;  // chunks of which nothing is left to enqueue; of the thread in advanceQueue()
  std::function<void(const std::optional<Error>&)> atEnd_;
};

bool GpuRails::serves(collectives::Collective collective) {
  using collectives::Collective;
  return collective == Collective::AllReduce || collective == Collective::ReduceScatter ||
         collective == Collective::AllGather || collective == Collective::Broadcast;
}

GpuRails::GpuRails(std::shared_ptr<engine::Engine> engine,
                   std::shared_ptr<engine::groups::Group> parent, c10::Device device, Groups groups)
    : engine_(std::move(engine)),
      parent_(std::move(parent)),
      device_(device),
      groups_(std::move(groups)) {}

std::shared_ptr<DeviceTurns> GpuRails::begin(const engine::calls::Request& request,
                                             const std::shared_ptr<DeviceCopies>& copies,
                                             CallMemoryPtr memory) {
  if (const auto error = failure()) throw *error;
  try {
    return std::make_shared<Turns>(shared_from_this(), request, copies, memory);
  } catch (const Error& error) {
    fail(error);
  } catch (const std::exception& error) {
    fail(errorOfRank(parent_->spec.me, error.what()));
  }
  // The stages that were enqueued before the error still use the tensors.
  keepForGood(std::move(memory));
  throw failure().value();
}

void GpuRails::fail(const Error& error) {
  engine_->fail(*parent_, error);
  engine_->fail(*groups_.railGroup, error);
}

void GpuRails::advanceQueue() {
  std::unique_lock lock(mutex_);
  again_ = true;
  if (busy_) return;
  busy_ = true;
  std::vector<std::pair<std::shared_ptr<Turns>, std::optional<Error>>> ended;
  while (std::exchange(again_, false)) {
    while (!queue_.empty()) {
      const auto head = queue_.front();
      lock.unlock();
      bool done = false;
      std::optional<Error> error;
      try {
        done = head->goOn();
      } catch (const Error& thrown) {
        error = thrown;
      } catch (const std::exception& thrown) {
        error = errorOfRank(parent_->spec.me, thrown.what());
      }
      lock.lock();
      if (!done && !error) break;
      queue_.pop_front();
      ended.emplace_back(head, error);
    }
  }
  busy_ = false;
  lock.unlock();
  // Without the lock: a turn that ends may run continuations, which may make calls and wait for them.
  for (const auto& [turns, error] : ended) turns->end(error);
}

void GpuRails::connect() {
  for (const auto& group : {groups_.scatter, groups_.gather}) {
    std::vector<at::Tensor> one{at::zeros({1}, at::TensorOptions(at::kFloat).device(device_))};
    group->call([&](auto& nccl) {
      c10d::AllreduceOptions options;
      options.asyncOp = true;
      return nccl.allreduce(one, options)->wait();
    });
  }
}

void GpuRails::abort() {
  if (const auto error = failure()) engine_->fail(*groups_.railGroup, *error);
  groups_.scatter->abort();
  groups_.gather->abort();
  groups_.rail->abort();
}

void GpuRails::abandon() {
  groups_.rail->shutdown();
  groups_.scatter->abort();
  groups_.gather->abort();
}

void GpuRails::shutdown() {
  groups_.rail->shutdown();
  groups_.scatter->shutdown();
  groups_.gather->shutdown();
}

}  // namespace smddp::process_group::device
