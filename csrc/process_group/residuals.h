// Keeps for each tensor what encoding has lost of it so far, for error feedback (docs/wire.md).
//
// A tensor is known by its memory: in the next call, the same part of the same storage is the same tensor. When the
// storage is gone, what was lost goes with it: another tensor may lie at the address by then.
//
// Threads: any.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

namespace smddp::process_group {

class Residuals {
 public:
  // The losses of tensors that are summed as one vector: one number for each element, zeros at first. Throws Resource
  // if there is no memory for them.
  std::shared_ptr<float[]> of(at::TensorList tensors);

 private:
  // Its storage and offset, then its number of elements; if it is not contiguous, its sizes and strides.
  using Part = std::tuple<const c10::StorageImpl*, int64_t, std::vector<int64_t>>;
  struct Entry {
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
    std::shared_ptr<float[]> values;
    bool isUsedAgain = false;
  };

  void drop();

  std::mutex mutex_;
  // Guarded by mutex_.
  std::map<std::vector<Part>, Entry> entries_;
  size_t mostEntries_ = 0;
  size_t usedAgain_ = 0;      // entries that a second call has used
  size_t droppedUnused_ = 0;  // entries that were dropped before that
  bool hasWarned_ = false;
};

}  // namespace smddp::process_group
