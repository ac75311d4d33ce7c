#include "process_group/residuals.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "common/error.h"
#include "common/log.h"

namespace smddp::process_group {
namespace {

// Untouched pages take no memory, and each rank touches only its share of a vector.
std::shared_ptr<float[]> zeros(int64_t count) {
  auto* const values = static_cast<float*>(std::calloc(static_cast<size_t>(count), sizeof(float)));
  if (values == nullptr) {
    raise(ErrorKind::Resource,
          "no memory for the error feedback of {} numbers: use a wire format without +feedback",
          count);
  }
  return {values, [](float* memory) { std::free(memory); }};
}

}  // namespace

std::shared_ptr<float[]> Residuals::of(at::TensorList tensors) {
  std::vector<Part> key;
  int64_t count = 0;
  for (const at::Tensor& tensor : tensors) {
    std::vector<int64_t> shape{tensor.numel()};
    if (!tensor.is_contiguous()) {
      shape = tensor.sizes().vec();
      shape.insert(shape.end(), tensor.strides().begin(), tensor.strides().end());
    }
    key.emplace_back(tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(),
                     std::move(shape));
    count += tensor.numel();
  }
  const std::lock_guard lock(mutex_);
  const auto isGone = [](const auto& storage) { return storage.expired(); };
  const auto known = entries_.find(key);
  if (known != entries_.end() && std::ranges::none_of(known->second.storages, isGone)) {
    usedAgain_ += !std::exchange(known->second.isUsedAgain, true);
    return known->second.values;
  }
  drop();
  Entry entry{.storages = {}, .values = zeros(count)};
  for (const at::Tensor& tensor : tensors)
    entry.storages.emplace_back(tensor.storage().getWeakStorageImpl());
  auto values = entry.values;
  entries_.emplace(std::move(key), std::move(entry));
  mostEntries_ = std::max(mostEntries_, entries_.size());
  return values;
}

// Drops what belongs to storages that are gone.
void Residuals::drop() {
  std::erase_if(entries_, [&](const auto& named) {
    const Entry& entry = named.second;
    const bool isGone =
        std::ranges::any_of(entry.storages, [](const auto& storage) { return storage.expired(); });
    droppedUnused_ += isGone && !entry.isUsedAgain;
    return isGone;
  });
  // DDP makes its buckets again after the first step: it drops each of them once, and then uses as many again and
  // again.
  constexpr size_t kSome = 8;
  if (hasWarned_ || droppedUnused_ <= 2 * (mostEntries_ + usedAgain_) + kSome) return;
  hasWarned_ = true;
  SMDDP_LOG(Warn, "process_group",
            "error feedback has no effect here: the script sums each tensor once and frees it, so "
            "what encoding has lost of {} tensors was dropped with them (docs/wire.md)",
            droppedUnused_);
}

}  // namespace smddp::process_group
