#include "process_group/staging.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "process_group/device_calls.h"

namespace smddp::process_group {
namespace {

// The tensor that has this rank's own block, and where the block begins. No address if the block is empty, or if its
// elements are not together.
struct OwnBlock {
  size_t holder = 0;
  const void* address = nullptr;
};

OwnBlock ownBlockOf(const Blocks& blocks) {
  int64_t begin = 0;
  for (size_t i = 0; i < blocks.tensors.size(); ++i) {
    const at::Tensor& tensor = blocks.tensors[i];
    if (blocks.count > 0 && blocks.begin < begin + tensor.numel()) {
      if (!usableInPlace(tensor)) return {};
      const auto offset = static_cast<size_t>(blocks.begin - begin) * tensor.itemsize();
      return {i, static_cast<const std::byte*>(tensor.const_data_ptr()) + offset};
    }
    begin += tensor.numel();
  }
  return {};
}

}  // namespace

bool usableInPlace(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

DeviceCall* Staging::deviceCallFor(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  TORCH_CHECK_VALUE(!tensorDevice_ || *tensorDevice_ == device,
                    "smddp: all tensors of a call must be on one device, got ", *tensorDevice_,
                    " and ", device);
  if (!tensorDevice_) {
    tensorDevice_ = device;
    if (!device.is_cpu()) device_ = devices_->begin(kind_, tensor, memory_);
  }
  return device_.get();
}

DeviceCall* Staging::deviceCallFor(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) deviceCallFor(tensor);
  return device_.get();
}

engine::calls::Piece Staging::place(const at::Tensor& tensor, Access access,
                                    const at::Tensor* except) {
  if (DeviceCall* const device = deviceCallFor(tensor)) return device->place(tensor, access);
  return placeAt(tensor, access, overlaps_.add(tensor, access, except));
}

engine::calls::Piece Staging::placeAt(const at::Tensor& tensor, Access access, bool mustCopy) {
  if (!mustCopy && usableInPlace(tensor)) return bytesOf(tensor);
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  at::Tensor copy;
  if (reads(access)) {
    copy = tensor.resolve_conj().resolve_neg().contiguous();
    if (copy.is_alias_of(tensor)) copy = copy.clone();
  } else {
    copy = at::empty(tensor.sizes(), tensor.options());
  }
  if (writes(access)) back_.emplace_back(tensor, copy);
  return bytesOf(memory_->add(std::move(copy)));
}

engine::calls::Pieces Staging::place(at::TensorList tensors, Access access) {
  if (DeviceCall* const device = deviceCallFor(tensors)) return device->place(tensors, access);
  engine::calls::Pieces pieces;
  pieces.reserve(tensors.size());
  const bool areApart = overlaps_.addIfApart(tensors, access);
  for (const at::Tensor& tensor : tensors) {
    pieces.push_back(placeAt(tensor, access, !areApart && overlaps_.add(tensor, access)));
  }
  return pieces;
}

engine::calls::Piece Staging::placeCopied(const at::Tensor& from, const at::Tensor& into,
                                          Access access) {
  deviceCallFor(into);
  if (DeviceCall* const device = deviceCallFor(from)) {
    return device->placeCopied(from, into, access);
  }
  const bool areSame = usableInPlace(from) && from.nbytes() == into.nbytes() &&
                       from.const_data_ptr() == into.const_data_ptr();
  overlaps_.add(from, access);
  const engine::calls::Piece bytes = place(into, Access::Write, areSame ? &from : nullptr);
  const bool isCopied = bytes.data() != into.const_data_ptr();
  // To torch, tensors of one element with different strides overlap partly. It refuses to copy them.
  if (areSame && !isCopied) return bytes;
  const at::Tensor& target = isCopied ? memory_->staged.back() : into;
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  target.view(-1).copy_(from.reshape(-1));
  return bytes;
}

std::pair<engine::calls::Pieces, engine::calls::Pieces> Staging::placeBlocks(
    const Blocks& sent, const Blocks& received) {
  deviceCallFor(sent.tensors);
  if (DeviceCall* const device = deviceCallFor(received.tensors)) {
    return device->placeBlocks(sent, received);
  }
  const OwnBlock from = ownBlockOf(sent), into = ownBlockOf(received);
  engine::calls::Pieces input = toRead(sent.tensors);
  // This rank's own block may lie in both lists: no other rank writes it.
  const bool isInPlace = from.address != nullptr && from.address == into.address &&
                         sent.tensors[from.holder].numel() == sent.count &&
                         sent.count == received.count && usableInPlace(sent.tensors[from.holder]);
  if (!isInPlace) return {std::move(input), toWrite(received.tensors)};
  engine::calls::Pieces output;
  for (size_t i = 0; i < received.tensors.size(); ++i) {
    const at::Tensor* const except = i == into.holder ? &sent.tensors[from.holder] : nullptr;
    output.push_back(place(received.tensors[i], Access::Write, except));
  }
  return {std::move(input), std::move(output)};
}

void Staging::finish(bool well) const {
  if (device_) return device_->finish(well);
  if (!well) return;
  // Autograd does not see how the operation changes other tensors, and must not see this either.
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  for (const auto& [into, from] : back_) into.copy_(from);
}

}  // namespace smddp::process_group
