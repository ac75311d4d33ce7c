// A group that passes calls on GPU tensors to NCCL where each rank has a GPU of its own. The base class serves all
// other calls: on CPU tensors, and on GPUs that ranks share or that are on several nodes.
//
// The first call with GPU tensors decides which way such calls go, for the life of the group (cuda/path.h). For that,
// the ranks tell one another through the store which GPU they use. A message between two ranks needs the GPUs of these
// two only. After that, a call only looks at the tensor before it goes to NCCL. It touches no stream, so it can be
// captured into a graph if NCCL's call can.
//
// Threads: as the base. Owns the group of NCCL, which is made when it is first needed and ends with this group.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include "cuda/path.h"
#include "process_group/device/calls.h"
#include "process_group/device/gpu_memory_path.h"
#include "process_group/device/gpu_rails.h"
#include "process_group/device/nccl_group.h"
#include "process_group/process_group.h"

namespace smddp::process_group::device {

// How to reach GPUs and NCCL, which this library is not linked with.
struct GpuSupport {
  c10::DeviceType type = c10::DeviceType::CUDA;
  // A name that no other GPU of the node has.
  std::function<std::string(c10::DeviceIndex)> nameOf;
  // Makes one rank of a group of NCCL; empty without NCCL.
  std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout)>
      makeNccl;
  // The CUDA part (cuda/library.h); empty without.
  std::string library;
};

class GpuProcessGroup final : public ProcessGroup, public Route {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;

  GpuProcessGroup(const Creation& creation, GpuSupport support);
  GpuProcessGroup(std::shared_ptr<engine::groups::Group> group, std::chrono::milliseconds timeout,
                  const c10::intrusive_ptr<c10d::Store>& store, GpuSupport support);
  ~GpuProcessGroup() override;

  void setTimeout(std::chrono::milliseconds timeout) override;
#if SMDDP_TORCH_VERSION_MINOR >= 15
  // NCCL's calls do not tell when they end. torch then takes a call for ended as soon as it is issued.
  bool supportsCompletionHooks() const override { return false; }
#endif
  void abortBecause(const std::string& reason) override;
  void shutdown() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputSplits,
                        std::vector<int64_t>& inputSplits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // NCCL can have messages in both directions under way only within one batch.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // Tells the others at once which GPU this rank uses: that of init_process_group(device_id=...). Waits for nobody.
  void eagerConnectSingleDevice(c10::Device device) override;

  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;

  // Memory of GPU buckets, if SMDDP_GPU_COMM_MEMORY asks for it: NCCL's, or memory that the other ranks can open.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // "host", "nccl", "ipc", "rails", or empty before the first collective on GPU tensors.
  std::string path() const;

 private:
  enum class State : uint8_t { Unknown, Host, Nccl, Ipc, Rails };
  static State stateOf(cuda::Path path) {
    switch (path) {
      case cuda::Path::Nccl: return State::Nccl;
      case cuda::Path::Ipc: return State::Ipc;
      case cuda::Path::Rails: return State::Rails;
      case cuda::Path::Host: break;
    }
    return State::Host;
  }

  bool serves(collectives::Collective collective, const at::Tensor& tensor,
              ReduceOp op) const override;
  std::shared_ptr<DeviceTurns> begin(const engine::calls::Request& request,
                                     const std::shared_ptr<DeviceCopies>& copies,
                                     CallMemoryPtr memory) override;

  // NCCL if it serves a collective, or a message to one rank; else null.
  NcclGroup* ncclFor(const at::Tensor& tensor, std::chrono::milliseconds timeout, bool serves);
  NcclGroup* ncclFor(const at::Tensor& tensor, std::chrono::milliseconds timeout);
  NcclGroup* ncclFor(const Tensors& tensors, std::chrono::milliseconds timeout);
  NcclGroup* reducingNcclFor(const at::Tensor& tensor, const c10d::ReduceOp& op,
                             std::chrono::milliseconds timeout);
  NcclGroup* reducingNcclFor(const Tensors& tensors, const c10d::ReduceOp& op,
                             std::chrono::milliseconds timeout);
  NcclGroup* messageNcclFor(const Tensors& tensors, int rank);
  bool isOnGpu(const at::Tensor& tensor) const;
  std::optional<c10::Device> boundDevice() const;
  // With mutex_ held.
  cuda::Choice connect(std::chrono::milliseconds timeout);
  State decide(std::chrono::milliseconds timeout);
  State decideFor(int rank);
  std::vector<cuda::Place> placesOf(const std::vector<int>& ranks, Nanoseconds timeout);
  void publish(c10::Device device);
  void makeNccl();
  void sendDirectly(Calls& calls) const;
  void makeRails(std::chrono::milliseconds timeout);
  // NCCL, if `state` says that it serves the call; else null. If this thread is coalescing, so is NCCL from now on.
  NcclGroup* used(State state);

  const c10::intrusive_ptr<c10d::Store> store_;
  const GpuSupport support_;
  std::atomic<State> state_{State::Unknown};
  std::atomic<bool> ncclHasServed_{false};  // a collective; it connects at the first
  std::mutex mutex_;
  // The device that init_process_group() bound, of a group that was split off. torch sets the bound device of a backend
  // itself, after the split, and demands that those of all device types be equal.
  std::optional<c10::Device> parentsDevice_;
  std::optional<c10::Device> device_;  // of the first GPU tensor; guarded by mutex_
  std::map<int, std::string> names_;   // of the ranks' GPUs, as far as known; guarded by mutex_
  std::map<int, State> messages_;      // by rank; guarded by mutex_
  std::shared_ptr<NcclGroup> made_;    // guarded by mutex_ until nccl_ is set
  std::atomic<NcclGroup*> nccl_{nullptr};
  std::shared_ptr<GpuMemoryPath> memory_;  // constant once state_ is Ipc
  std::shared_ptr<GpuRails> rails_;        // constant once state_ is Rails
};

}  // namespace smddp::process_group::device
