#include "process_group/device/rail_sum.h"

#include "cuda/library.h"
#include "process_group/checks.h"

namespace smddp::process_group::device {
namespace {

c10::intrusive_ptr<Work> ours(const c10::intrusive_ptr<c10d::Work>& work) {
  return c10::intrusive_ptr<Work>::reclaim_copy(static_cast<Work*>(work.get()));
}

template <typename Options>
Options optionsOf(const RailSum::Call& call) {
  Options options;
  options.timeout = call.timeout;
  options.asyncOp = true;
  return options;
}

class OnCpu final : public RailSum {
 public:
  explicit OnCpu(Rail rail) : rail_(std::move(rail)) {}

  Steps sumAll(const Call& call, const at::Tensor& share) override {
    auto options = optionsOf<c10d::AllreduceOptions>(call);
    options.reduceOp = call.op;
    std::vector<at::Tensor> shares{share};
    return {ours(rail_->allreduce(shares, options)), nullptr};
  }

  Steps sumBlocks(const Call& call, const at::Tensor& output, const at::Tensor& blocks) override {
    auto options = optionsOf<c10d::ReduceScatterOptions>(call);
    options.reduceOp = call.op;
    at::Tensor into = output, from = blocks;
    return {ours(rail_->_reduce_scatter_base(into, from, options)), nullptr};
  }

 private:
  const Rail rail_;
};

class OnGpu final : public RailSum {
 public:
  OnGpu(Rail rail, Rail second, const cuda::DeviceTable& table)
      : rail_(std::move(rail)), second_(std::move(second)), table_(table) {}

  int64_t multiple() const override { return rail_->getSize(); }

  Steps sumAll(const Call& call, const at::Tensor& share) override {
    const at::Tensor theirs = at::empty_like(share);
    return {exchange(call, theirs, share), [this, call, theirs, share] {
              at::Tensor sum = at::empty({share.numel() / multiple()}, share.options());
              enqueueSum(call, theirs, sum);
              at::Tensor into = share;
              auto options = optionsOf<c10d::AllgatherOptions>(call);
              return ours(second_->_allgather_base(into, sum, options));
            }};
  }

  Steps sumBlocks(const Call& call, const at::Tensor& output, const at::Tensor& blocks) override {
    const at::Tensor theirs = at::empty_like(blocks);
    return {exchange(call, theirs, blocks), [this, call, theirs, output] {
              enqueueSum(call, theirs, output);
              return c10::intrusive_ptr<Work>();
            }};
  }

 private:
  c10::intrusive_ptr<Work> exchange(const Call& call, at::Tensor into, at::Tensor from) const {
    std::vector<int64_t> none;
    auto options = optionsOf<c10d::AllToAllOptions>(call);
    return ours(rail_->alltoall_base(into, from, none, none, options));
  }

  // `blocks`: one from each node, in the order of nodes.
  void enqueueSum(const Call& call, const at::Tensor& blocks, const at::Tensor& sum) const {
    if (sum.numel() == 0) return;
    call.copies->use(blocks);
    call.copies->use(sum);
    cuda::Job job;
    job.numSrcs = static_cast<int32_t>(multiple());
    job.numDsts = 1;
    for (int32_t node = 0; node < job.numSrcs; ++node) {
      job.srcs[node] = static_cast<const std::byte*>(blocks.data_ptr()) +
                       static_cast<size_t>(node) * sum.nbytes();
    }
    job.dsts[0] = sum.data_ptr();
    job.count = static_cast<uint64_t>(sum.numel());
    job.type = reducibleType("a sum between nodes", sum);
    job.op = reduceOpOf("a sum between nodes", call.op);
    job.post = job.op == ReduceOp::AVG;
    job.divisor = multiple();
    cuda::check(table_,
                table_.run(sum.device().index(), &job, call.copies->stream().native_handle()),
                "summing between nodes");
  }

  const Rail rail_, second_;
  const cuda::DeviceTable& table_;
};

}  // namespace

std::unique_ptr<RailSum> RailSum::onCpu(Rail rail) {
  return std::make_unique<OnCpu>(std::move(rail));
}

std::unique_ptr<RailSum> RailSum::onGpu(Rail rail, Rail second, const cuda::DeviceTable& table) {
  return std::make_unique<OnGpu>(std::move(rail), std::move(second), table);
}

}  // namespace smddp::process_group::device
