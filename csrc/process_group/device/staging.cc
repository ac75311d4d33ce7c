#include "process_group/device/staging.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "process_group/errors.h"
#include "process_group/staging.h"

namespace smddp::process_group::device {
namespace {

// The element of all tensors, one behind the other, at which each begins; and the end.
std::vector<int64_t> beginsOf(at::TensorList tensors) {
  std::vector<int64_t> begins{0};
  for (const at::Tensor& tensor : tensors) begins.push_back(begins.back() + tensor.numel());
  return begins;
}

// The tensor that has this rank's own block.
size_t holderOf(const Blocks& blocks, const std::vector<int64_t>& begins) {
  size_t i = 0;
  while (i + 1 < blocks.tensors.size() && begins[i + 1] <= blocks.begin) ++i;
  return i;
}

}  // namespace

void StagedCall::finish(bool well) {
  if (well) {
    for (const auto& [into, from] : back_) copies_->putBack(into, from);
  }
  copies_->finish();
}

// --- through memory of the host ---------------------------------------------------------------------------

engine::calls::Piece HostStaging::place(const at::Tensor& tensor, Access access) {
  if (access == Access::Send && canSend(tensor)) return sendInPlace(tensor);
  const at::Tensor copy = memory_->add(DeviceCopies::pinnedLike(tensor));
  if (reads(access)) copies_->fetch(tensor, copy);
  if (writes(access)) back_.emplace_back(tensor, copy);
  return bytesOf(copy);
}

engine::calls::Pieces HostStaging::place(at::TensorList tensors, Access access) {
  engine::calls::Pieces pieces;
  for (const at::Tensor& tensor : tensors) pieces.push_back(place(tensor, access));
  return pieces;
}

engine::calls::Piece HostStaging::placeCopied(const at::Tensor& from, const at::Tensor& into,
                                              Access access) {
  if (access == Access::Send && canSend(from)) return giveOwn(into, from);
  const at::Tensor copy = memory_->add(DeviceCopies::pinnedLike(into));
  back_.emplace_back(into, copy);
  copies_->fetch(from, copy);
  return bytesOf(copy);
}

std::pair<engine::calls::Pieces, engine::calls::Pieces> HostStaging::placeBlocks(
    const Blocks& sent, const Blocks& received) {
  const auto begins = beginsOf(received.tensors);
  const size_t holder = holderOf(received, begins);
  const at::Tensor& whole = received.tensors[holder];
  // Within a tensor a block can only be told apart where that is in row-major order.
  const bool isWhole = received.count == whole.numel();
  if (sent.count != received.count || (!isWhole && !usableInPlace(whole)) ||
      !canSend(sent.tensors)) {
    return {place(sent.tensors, Access::Read), place(received.tensors, Access::Write)};
  }
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  const auto sentBegins = beginsOf(sent.tensors);
  const size_t giver = holderOf(sent, sentBegins);
  const at::Tensor own =
      sent.tensors[giver].view(-1).narrow(0, sent.begin - sentBegins[giver], sent.count);
  engine::calls::Pieces input, output;
  for (const at::Tensor& tensor : sent.tensors) input.push_back(sendInPlace(tensor));
  for (size_t i = 0; i < received.tensors.size(); ++i) {
    const at::Tensor& tensor = received.tensors[i];
    if (i != holder) {
      output.push_back(place(tensor, Access::Write));
    } else if (isWhole) {
      output.push_back(giveOwn(tensor, own));
    } else {
      const at::Tensor flat = tensor.view(-1);
      const int64_t begin = received.begin - begins[i], end = begin + received.count;
      if (begin > 0) output.push_back(place(flat.narrow(0, 0, begin), Access::Write));
      output.push_back(giveOwn(flat.narrow(0, begin, received.count), own));
      if (end < flat.numel()) {
        output.push_back(place(flat.narrow(0, end, flat.numel() - end), Access::Write));
      }
    }
  }
  return {std::move(input), std::move(output)};
}

bool HostStaging::canSend(at::TensorList tensors) const {
  return sources_ != nullptr &&
         std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
           return usableInPlace(tensor) &&
                  (tensor.numel() == 0 || translated([&] { return sources_->add(tensor); }));
         });
}

engine::calls::Piece HostStaging::sendInPlace(const at::Tensor& tensor) {
  copies_->awaitStream();
  return {bytesOf(memory_->add(tensor)), /*isOnDevice=*/true};
}

engine::calls::Piece HostStaging::giveOwn(const at::Tensor& into, const at::Tensor& own) {
  if (!into.is_contiguous() || into.data_ptr() != own.data_ptr()) {
    copies_->use(own);
    const at::AutoDispatchBelowADInplaceOrView noAutograd;
    back_.emplace(back_.begin(), into, own.view(into.sizes()));
  }
  return sendInPlace(own);
}

// --- on the device ----------------------------------------------------------------------------------------

at::Tensor DeviceStaging::residentOf(const at::Tensor& tensor, Access access) {
  copies_->use(tensor);
  if (usableInPlace(tensor)) return tensor;
  // On the call's stream, like all that is done with it.
  const c10::StreamGuard guard(copies_->stream());
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  const at::Tensor copy =
      memory_->add(reads(access) ? tensor.resolve_conj().resolve_neg().contiguous()
                                 : at::empty(tensor.sizes(), tensor.options()));
  if (writes(access)) back_.emplace_back(tensor, copy);
  return copy;
}

engine::calls::Piece DeviceStaging::place(const at::Tensor& tensor, Access access) {
  return bytesOf(residentOf(tensor, access));
}

engine::calls::Pieces DeviceStaging::place(at::TensorList tensors, Access access) {
  if (tensors.empty()) return {};
  if (tensors.size() == 1) return {place(tensors.front(), access)};
  for (const at::Tensor& tensor : tensors) copies_->use(tensor);
  const c10::StreamGuard guard(copies_->stream());
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  const auto begins = beginsOf(tensors);
  const at::Tensor all = memory_->add(at::empty({begins.back()}, tensors.front().options()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const at::Tensor part = all.narrow(0, begins[i], tensor.numel()).view(tensor.sizes());
    if (reads(access)) part.copy_(tensor, /*non_blocking=*/true);
    if (writes(access)) back_.emplace_back(tensor, part);
  }
  return {bytesOf(all)};
}

engine::calls::Piece DeviceStaging::placeCopied(const at::Tensor& from, const at::Tensor& into,
                                                Access) {
  at::Tensor target = residentOf(into, Access::Write);
  copies_->use(from);
  const c10::StreamGuard guard(copies_->stream());
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  target.copy_(from, /*non_blocking=*/true);
  return bytesOf(target);
}

std::pair<engine::calls::Pieces, engine::calls::Pieces> DeviceStaging::placeBlocks(
    const Blocks& sent, const Blocks& received) {
  return {place(sent.tensors, Access::Read), place(received.tensors, Access::Write)};
}

}  // namespace smddp::process_group::device
