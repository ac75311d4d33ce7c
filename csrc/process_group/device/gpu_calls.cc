// The calls of a GpuProcessGroup: NCCL carries out those that it can, the base all others.
#include "process_group/device/gpu_process_group.h"
#include "process_group/errors.h"

namespace smddp::process_group::device {

using WorkPtr = GpuProcessGroup::WorkPtr;

WorkPtr GpuProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  if (auto* nccl = ncclFor(tensors, options.timeout)) {
    return nccl->call([&](auto& backend) { return backend.broadcast(tensors, options); });
  }
  return ProcessGroup::broadcast(tensors, options);
}

WorkPtr GpuProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (auto* nccl = reducingNcclFor(tensors, options.reduceOp, options.timeout)) {
    return nccl->call([&](auto& backend) { return backend.allreduce(tensors, options); });
  }
  return ProcessGroup::allreduce(tensors, options);
}

WorkPtr GpuProcessGroup::allreduce_coalesced(Tensors& tensors,
                                             const c10d::AllreduceCoalescedOptions& options) {
  if (auto* nccl = reducingNcclFor(tensors, options.reduceOp, options.timeout)) {
    return nccl->call([&](auto& backend) { return backend.allreduce_coalesced(tensors, options); });
  }
  return ProcessGroup::allreduce_coalesced(tensors, options);
}

WorkPtr GpuProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (auto* nccl = reducingNcclFor(tensors, options.reduceOp, options.timeout)) {
    return nccl->call([&](auto& backend) { return backend.reduce(tensors, options); });
  }
  return ProcessGroup::reduce(tensors, options);
}

WorkPtr GpuProcessGroup::allgather(TensorLists& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& options) {
  if (auto* nccl = ncclFor(inputs, options.timeout)) {
    return nccl->call([&](auto& backend) { return backend.allgather(outputs, inputs, options); });
  }
  return ProcessGroup::allgather(outputs, inputs, options);
}

WorkPtr GpuProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::AllgatherOptions& options) {
  if (auto* nccl = ncclFor(input, options.timeout)) {
    return nccl->call(
        [&](auto& backend) { return backend._allgather_base(output, input, options); });
  }
  return ProcessGroup::_allgather_base(output, input, options);
}

WorkPtr GpuProcessGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& options) {
  if (auto* nccl = ncclFor(inputs, options.timeout)) {
    return nccl->call([&](auto& backend) {
      return backend.allgather_into_tensor_coalesced(outputs, inputs, options);
    });
  }
  return ProcessGroup::allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPtr GpuProcessGroup::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ReduceScatterOptions& options) {
  if (auto* nccl = reducingNcclFor(outputs, options.reduceOp, options.timeout)) {
    return nccl->call(
        [&](auto& backend) { return backend.reduce_scatter(outputs, inputs, options); });
  }
  return ProcessGroup::reduce_scatter(outputs, inputs, options);
}

WorkPtr GpuProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::ReduceScatterOptions& options) {
  if (auto* nccl = reducingNcclFor(output, options.reduceOp, options.timeout)) {
    return nccl->call(
        [&](auto& backend) { return backend._reduce_scatter_base(output, input, options); });
  }
  return ProcessGroup::_reduce_scatter_base(output, input, options);
}

WorkPtr GpuProcessGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  if (auto* nccl = reducingNcclFor(outputs, options.reduceOp, options.timeout)) {
    return nccl->call([&](auto& backend) {
      return backend.reduce_scatter_tensor_coalesced(outputs, inputs, options);
    });
  }
  return ProcessGroup::reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr GpuProcessGroup::gather(TensorLists& outputs, Tensors& inputs,
                                const c10d::GatherOptions& options) {
  if (auto* nccl = ncclFor(inputs, options.timeout)) {
    return nccl->call([&](auto& backend) { return backend.gather(outputs, inputs, options); });
  }
  return ProcessGroup::gather(outputs, inputs, options);
}

WorkPtr GpuProcessGroup::scatter(Tensors& outputs, TensorLists& inputs,
                                 const c10d::ScatterOptions& options) {
  if (auto* nccl = ncclFor(outputs, options.timeout)) {
    return nccl->call([&](auto& backend) { return backend.scatter(outputs, inputs, options); });
  }
  return ProcessGroup::scatter(outputs, inputs, options);
}

WorkPtr GpuProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                       std::vector<int64_t>& outputSplits,
                                       std::vector<int64_t>& inputSplits,
                                       const c10d::AllToAllOptions& options) {
  if (auto* nccl = ncclFor(input, options.timeout)) {
    return nccl->call([&](auto& backend) {
      return backend.alltoall_base(output, input, outputSplits, inputSplits, options);
    });
  }
  return ProcessGroup::alltoall_base(output, input, outputSplits, inputSplits, options);
}

WorkPtr GpuProcessGroup::alltoall(Tensors& outputs, Tensors& inputs,
                                  const c10d::AllToAllOptions& options) {
  if (auto* nccl = ncclFor(inputs, options.timeout)) {
    return nccl->call([&](auto& backend) { return backend.alltoall(outputs, inputs, options); });
  }
  return ProcessGroup::alltoall(outputs, inputs, options);
}

WorkPtr GpuProcessGroup::barrier(const c10d::BarrierOptions& options) {
  std::optional<c10::Device> device;
  {
    const std::lock_guard lock(mutex_);
    device = device_;
  }
  if (device && isCapturing(*device)) {
    C10_THROW_ERROR(NotImplementedError,
                    "smddp: barrier() cannot be captured into a CUDA graph: the host waits in it. "
                    "In the graph the calls themselves keep the order");
  }
  // NCCL's barrier covers what NCCL has under way on the GPU. All ranks know alike whether NCCL serves collectives.
  if (state_.load(std::memory_order_acquire) == State::Nccl) {
    c10d::BarrierOptions theirs = options;
    // NCCL returns no Work for a synchronous barrier. Without a device it would guess the GPU from the rank.
    theirs.asyncOp = true;
    theirs.device = device;
    theirs.device_ids = {device->index()};
    nccl_.load()->call([&](auto& backend) { return backend.barrier(theirs)->wait(); });
  }
  return ProcessGroup::barrier(options);
}

WorkPtr GpuProcessGroup::send(Tensors& tensors, int destination, int tag) {
  if (auto* nccl = messageNcclFor(tensors, destination)) {
    return nccl->call([&](auto& backend) { return backend.send(tensors, destination, tag); });
  }
  return ProcessGroup::send(tensors, destination, tag);
}

WorkPtr GpuProcessGroup::recv(Tensors& tensors, int source, int tag) {
  if (auto* nccl = messageNcclFor(tensors, source)) {
    return nccl->call([&](auto& backend) { return backend.recv(tensors, source, tag); });
  }
  return ProcessGroup::recv(tensors, source, tag);
}

WorkPtr GpuProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  for (int source = 0; source < getSize(); ++source) {
    if (messageNcclFor(tensors, source) == nullptr) continue;
    C10_THROW_ERROR(NotImplementedError,
                    c10::str("smddp: recv from any source is not implemented for GPU tensors that "
                             "NCCL moves (those of rank ",
                             source, "); name the source, or set SMDDP_GPU_PATH=host"));
  }
  return ProcessGroup::recvAnysource(tensors, tag);
}

}  // namespace smddp::process_group::device
