// A stand-in for NCCL, for tests that capture graphs: a call enqueues one task on the current stream and does nothing
// else.
//
// It takes all ranks to have the same values: so a sum is a product, and other calls leave their tensors as they are.
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "process_group/fake_device.h"

namespace fake_device {
namespace {

class RecordingNccl final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using c10d::Backend::Backend;

  const std::string getBackendName() const override { return "recording"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override { return c10::make_intrusive<Enqueued>(); }
  void shutdown() override {}
  void abort() override {}

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override {
    // Of float32.
    laneOf(currentStreamId())
        .add([values = tensors.front().data_ptr<float>(), count = tensors.front().numel(),
              size = getSize()] {
          expectLive(values);
          for (int64_t i = 0; i < count; ++i) values[i] *= static_cast<float>(size);
        });
    return called("allreduce");
  }
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override {
    return called("broadcast");
  }
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override { return called("reduce"); }
  WorkPtr allgather(TensorLists&, Tensors&, const c10d::AllgatherOptions&) override {
    return called("allgather");
  }
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override {
    return called("_allgather_base");
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&,
                                          const c10d::AllgatherOptions&) override {
    return called("allgather_into_tensor_coalesced");
  }
  WorkPtr reduce_scatter(Tensors&, TensorLists&, const c10d::ReduceScatterOptions&) override {
    return called("reduce_scatter");
  }
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&,
                               const c10d::ReduceScatterOptions&) override {
    return called("_reduce_scatter_base");
  }
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override {
    return called("alltoall_base");
  }
  WorkPtr gather(TensorLists&, Tensors&, const c10d::GatherOptions&) override {
    return called("gather");
  }
  WorkPtr scatter(Tensors&, TensorLists&, const c10d::ScatterOptions&) override {
    return called("scatter");
  }
  WorkPtr send(Tensors&, int, int) override { return called("send"); }
  WorkPtr recv(Tensors&, int, int) override { return called("recv"); }

  const std::vector<std::string>& calls() const { return calls_; }

 private:
  WorkPtr called(const char* name) {
    calls_.emplace_back(name);
    return c10::make_intrusive<Enqueued>();
  }

  std::vector<std::string> calls_;
};

}  // namespace

void bindRecordingNccl(pybind11::module_& m) {
  pybind11::module_::import("torch.distributed");
  pybind11::class_<RecordingNccl, c10d::Backend, c10::intrusive_ptr<RecordingNccl>>(m,
                                                                                    "RecordingNccl")
      .def(pybind11::init<int, int>())
      .def("calls", &RecordingNccl::calls);
}

}  // namespace fake_device
