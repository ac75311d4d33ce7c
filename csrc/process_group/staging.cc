#include "process_group/staging.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>

namespace smddp::process_group {
namespace {

std::span<std::byte> bytesOf(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

template <typename One>
engine::Pieces each(const std::vector<at::Tensor>& tensors, const One& one) {
  engine::Pieces pieces;
  pieces.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) pieces.push_back(one(tensor));
  return pieces;
}

}  // namespace

bool usableInPlace(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

bool Staging::joins(const std::vector<at::Tensor>& tensors) {
  return staysOnDevice_ && tensors.size() > 1 && onDevice(tensors.front());
}

at::Tensor Staging::keep(at::Tensor tensor) { return kept_.emplace_back(std::move(tensor)); }

bool Staging::onDevice(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  TORCH_CHECK_VALUE(!place_ || *place_ == device,
                    "smddp: all tensors of a call must be on one device, got ", *place_, " and ",
                    device);
  if (place_) return device_ != nullptr;
  place_ = device;
  if (!device.is_cpu()) device_ = std::make_shared<DeviceCopies>(device);
  return device_ != nullptr;
}

at::Tensor Staging::residentOf(const at::Tensor& tensor, bool reads) {
  device_->use(tensor);
  if (usableInPlace(tensor)) return tensor;
  // Of the call's stream, like all that is done with it.
  const c10::StreamGuard guard(device_->stream());
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  return keep(reads ? tensor.resolve_conj().resolve_neg().contiguous()
                    : at::empty(tensor.sizes(), tensor.options()));
}

engine::Piece Staging::read(const at::Tensor& tensor) {
  if (onDevice(tensor)) {
    if (staysOnDevice_) return bytesOf(residentOf(tensor, true));
    const at::Tensor copy = keep(DeviceCopies::pinnedLike(tensor));
    device_->fetch(tensor, copy);
    return bytesOf(copy);
  }
  if (usableInPlace(tensor)) return bytesOf(tensor);
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  return bytesOf(keep(tensor.resolve_conj().resolve_neg().contiguous()));
}

engine::Piece Staging::write(const at::Tensor& tensor) {
  if (onDevice(tensor)) {
    if (staysOnDevice_) {
      const at::Tensor place = residentOf(tensor, false);
      if (!place.is_same(tensor)) back_.emplace_back(tensor, place);
      return bytesOf(place);
    }
    const at::Tensor copy = keep(DeviceCopies::pinnedLike(tensor));
    back_.emplace_back(tensor, copy);
    return bytesOf(copy);
  }
  if (usableInPlace(tensor)) return bytesOf(tensor);
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  const at::Tensor copy = keep(at::empty(tensor.sizes(), tensor.options()));
  back_.emplace_back(tensor, copy);
  return bytesOf(copy);
}

engine::Piece Staging::update(const at::Tensor& tensor) {
  if (onDevice(tensor) && staysOnDevice_) {
    const at::Tensor place = residentOf(tensor, true);
    if (!place.is_same(tensor)) back_.emplace_back(tensor, place);
    return bytesOf(place);
  }
  if (!onDevice(tensor) && usableInPlace(tensor)) return bytesOf(tensor);
  const auto bytes = read(tensor);
  back_.emplace_back(tensor, kept_.back());
  return bytes;
}

engine::Piece Staging::joined(const std::vector<at::Tensor>& tensors, bool reads, bool writes) {
  int64_t count = 0;
  for (const at::Tensor& tensor : tensors) {
    onDevice(tensor);  // refuses tensors of several places
    device_->use(tensor);
    count += tensor.numel();
  }
  const c10::StreamGuard guard(device_->stream());
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  const at::Tensor all = keep(at::empty({count}, tensors.front().options()));
  int64_t first = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor part = all.narrow(0, first, tensor.numel()).view(tensor.sizes());
    first += tensor.numel();
    if (reads) part.copy_(tensor, /*non_blocking=*/true);
    if (writes) back_.emplace_back(tensor, part);
  }
  return bytesOf(all);
}

engine::Piece Staging::readThrough(const at::Tensor& from, const at::Tensor& into) {
  const auto bytes = write(into);
  if (onDevice(from) && staysOnDevice_) {
    device_->use(from);
    const c10::StreamGuard guard(device_->stream());
    const at::AutoDispatchBelowADInplaceOrView noAutograd;
    (usableInPlace(into) ? into : kept_.back()).copy_(from, /*non_blocking=*/true);
    return bytes;
  }
  if (onDevice(from)) {
    device_->fetch(from, kept_.back());
    return bytes;
  }
  const at::Tensor& place = usableInPlace(into) ? into : kept_.back();
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  place.view(-1).copy_(from.reshape(-1));
  return bytes;
}

engine::Pieces Staging::read(const std::vector<at::Tensor>& tensors) {
  if (joins(tensors)) return {joined(tensors, true, false)};
  return each(tensors, [this](const at::Tensor& tensor) { return read(tensor); });
}

engine::Pieces Staging::write(const std::vector<at::Tensor>& tensors) {
  if (joins(tensors)) return {joined(tensors, false, true)};
  return each(tensors, [this](const at::Tensor& tensor) { return write(tensor); });
}

engine::Pieces Staging::update(const std::vector<at::Tensor>& tensors) {
  if (joins(tensors)) return {joined(tensors, true, true)};
  return each(tensors, [this](const at::Tensor& tensor) { return update(tensor); });
}

engine::Piece Staging::readInPlace(const at::Tensor& tensor) {
  onDevice(tensor);
  device_->awaitStream();
  return {bytesOf(keep(tensor)), /*isOnDevice=*/true};
}

engine::Pieces Staging::readInPlace(at::TensorList tensors) {
  engine::Pieces pieces;
  for (const at::Tensor& tensor : tensors) pieces.push_back(readInPlace(tensor));
  return pieces;
}

engine::Pieces Staging::writeAround(at::TensorList tensors, size_t mine, const at::Tensor& own) {
  engine::Pieces pieces;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i != mine) {
      pieces.push_back(write(tensors[i]));
      continue;
    }
    pieces.push_back(readInPlace(own));
    if (tensors[i].is_contiguous() && tensors[i].data_ptr() == own.data_ptr()) continue;
    device_->use(own);
    const at::AutoDispatchBelowADInplaceOrView noAutograd;
    back_.emplace(back_.begin(), tensors[i], own.view(tensors[i].sizes()));
  }
  return pieces;
}

engine::Pieces Staging::writeAround(const at::Tensor& tensor, int64_t begin,
                                    const at::Tensor& own) {
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  const at::Tensor flat = tensor.view(-1);
  const int64_t end = begin + own.numel();
  std::vector<at::Tensor> parts{flat.narrow(0, begin, own.numel())};
  const size_t mine = begin > 0 ? 1 : 0;
  if (begin > 0) parts.insert(parts.begin(), flat.narrow(0, 0, begin));
  if (end < flat.numel()) parts.push_back(flat.narrow(0, end, flat.numel() - end));
  return writeAround(parts, mine, own);
}

void Staging::finish(bool well) const {
  if (device_) {
    if (well) {
      for (const auto& [into, from] : back_) device_->putBack(into, from);
    }
    device_->finish();
    return;
  }
  if (!well) return;
  // The bytes of other tensors change unseen by autograd; so do these.
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  for (const auto& [into, from] : back_) into.copy_(from);
}

}  // namespace smddp::process_group
