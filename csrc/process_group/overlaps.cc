#include "process_group/overlaps.h"

#include <algorithm>
#include <vector>

namespace smddp::process_group {

Overlaps::Extent Overlaps::extentOf(const at::Tensor& tensor, Access access) {
  const auto* const begin = static_cast<const std::byte*>(tensor.const_data_ptr());
  if (tensor.is_contiguous() || tensor.numel() == 0) {
    return {begin, begin + tensor.nbytes(), writes(access)};
  }
  // The offset of the last element: (2, 3) elements with strides (10, 1) end behind element 1 * 10 + 2 * 1.
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + static_cast<size_t>(last + 1) * tensor.itemsize(), writes(access)};
}

bool Overlaps::add(const at::Tensor& tensor, Access access, const at::Tensor* except) {
  const Extent mine = extentOf(tensor, access);
  auto numShared = std::count_if(extents_.begin(), extents_.end(), [&](const Extent& other) {
    return (mine.isWritten || other.isWritten) && mine.begin < other.end && other.begin < mine.end;
  });
  if (except != nullptr && numShared > 0) --numShared;
  extents_.push_back(mine);
  return numShared > 0;
}

bool Overlaps::addIfApart(at::TensorList tensors, Access access) {
  std::vector<Extent> all(extents_.begin(), extents_.end());
  all.reserve(extents_.size() + tensors.size());
  for (const at::Tensor& tensor : tensors) all.push_back(extentOf(tensor, access));
  const auto isBefore = [](const Extent& a, const Extent& b) { return a.begin < b.begin; };
  if (!std::is_sorted(all.begin(), all.end(), isBefore))
    std::sort(all.begin(), all.end(), isBefore);
  const std::byte* end = nullptr;  // of all tensors so far
  const std::byte* endOfWritten = nullptr;
  for (const Extent& extent : all) {
    if (extent.begin == extent.end) continue;
    if (extent.begin < (extent.isWritten ? end : endOfWritten)) return false;
    end = std::max(end, extent.end);
    if (extent.isWritten) endOfWritten = std::max(endOfWritten, extent.end);
  }
  extents_.assign(all.begin(), all.end());
  return true;
}

}  // namespace smddp::process_group
