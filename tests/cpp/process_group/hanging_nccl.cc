// A stand-in for NCCL, for tests in which ranks are lost. As NCCL enqueues a kernel, a call enqueues one task on the
// current stream. It does not talk to other ranks: a test says whether tasks hang from now on, as kernels do that wait
// for a lost rank, or whether calls fail. abort() ends tasks that hang.
//
// It takes all ranks to have the same values, see recording_nccl.cc.
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "process_group/fake_device.h"

namespace fake_device {
namespace {

class HangingNccl final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using c10d::Backend::Backend;

  const std::string getBackendName() const override { return "hanging"; }

  void hang() { state_->hangs = true; }
  void breakDown() { broken_ = true; }
  int aborts() const { return state_->aborts; }

  void abort() override {
    const std::lock_guard lock(state_->mutex);
    ++state_->aborts;
    state_->changed.notify_all();
  }
  // Waits for what it has enqueued, as NCCL does.
  void shutdown() override {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait(lock, [this] { return state_->enqueued == 0; });
  }

  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override { return enqueue(); }
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override { return enqueue(); }
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override {
    return enqueue();
  }
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&,
                               const c10d::ReduceScatterOptions&) override {
    return enqueue();
  }
  // As in NCCL, a synchronous barrier has no Work.
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto work = enqueue();
    return options.asyncOp ? work : nullptr;
  }

 private:
  // Shared with the stream, which may come to a task when this object is gone.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> hangs{false};
    int enqueued = 0;  // guarded by mutex
    std::atomic<int> aborts{0};
  };

  WorkPtr enqueue() {
    if (broken_) C10_THROW_ERROR(DistBackendError, "the made-up NCCL has an unhandled error");
    {
      const std::lock_guard lock(state_->mutex);
      ++state_->enqueued;
    }
    laneOf(currentStreamId()).add([state = state_, hangs = state_->hangs.load()] {
      std::unique_lock lock(state->mutex);
      state->changed.wait(lock, [&] { return !hangs || state->aborts > 0; });
      --state->enqueued;
      state->changed.notify_all();
    });
    return c10::make_intrusive<Enqueued>();
  }

  const std::shared_ptr<State> state_ = std::make_shared<State>();
  std::atomic<bool> broken_{false};
};

}  // namespace

void bindHangingNccl(pybind11::module_& m) {
  pybind11::module_::import("torch.distributed");
  pybind11::class_<HangingNccl, c10d::Backend, c10::intrusive_ptr<HangingNccl>>(m, "HangingNccl")
      .def(pybind11::init<int, int>())
      .def("hang", &HangingNccl::hang)
      .def("break_down", &HangingNccl::breakDown)
      .def("aborts", &HangingNccl::aborts);
}

}  // namespace fake_device
