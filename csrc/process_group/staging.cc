#include "process_group/staging.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "process_group/device_calls.h"

namespace smddp::process_group {

bool usableInPlace(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

DeviceCall* Staging::deviceOf(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  TORCH_CHECK_VALUE(!place_ || *place_ == device,
                    "smddp: all tensors of a call must be on one device, got ", *place_, " and ",
                    device);
  if (!place_) {
    place_ = device;
    if (!device.is_cpu()) device_ = devices_->begin(kind_, tensor);
  }
  return device_.get();
}

DeviceCall* Staging::deviceOf(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) deviceOf(tensor);
  return device_.get();
}

engine::Piece Staging::place(const at::Tensor& tensor, Access access) {
  if (DeviceCall* const device = deviceOf(tensor)) return device->place(tensor, access);
  if (usableInPlace(tensor)) return bytesOf(tensor);
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  const at::Tensor& copy =
      kept_.emplace_back(reads(access) ? tensor.resolve_conj().resolve_neg().contiguous()
                                       : at::empty(tensor.sizes(), tensor.options()));
  if (writes(access)) back_.emplace_back(tensor, copy);
  return bytesOf(copy);
}

engine::Pieces Staging::place(at::TensorList tensors, Access access) {
  if (DeviceCall* const device = deviceOf(tensors)) return device->place(tensors, access);
  engine::Pieces pieces;
  pieces.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) pieces.push_back(place(tensor, access));
  return pieces;
}

engine::Piece Staging::placeThrough(const at::Tensor& from, const at::Tensor& into, Access access) {
  deviceOf(into);
  if (DeviceCall* const device = deviceOf(from)) return device->placeThrough(from, into, access);
  const engine::Piece bytes = write(into);
  const at::Tensor& place = usableInPlace(into) ? into : kept_.back();
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  place.view(-1).copy_(from.reshape(-1));
  return bytes;
}

std::pair<engine::Pieces, engine::Pieces> Staging::placeBlocks(const Blocks& sent,
                                                               const Blocks& received) {
  deviceOf(sent.tensors);
  if (DeviceCall* const device = deviceOf(received.tensors)) {
    return device->placeBlocks(sent, received);
  }
  return {read(sent.tensors), write(received.tensors)};
}

void Staging::finish(bool well) const {
  if (device_) return device_->finish(well);
  if (!well) return;
  // The bytes of other tensors change unseen by autograd; so do these.
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  for (const auto& [into, from] : back_) into.copy_(from);
}

}  // namespace smddp::process_group
