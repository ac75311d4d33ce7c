// Which tensors of one call share memory, so that the call has a defined result all the same.
//
// The rule: a call sees all its tensors as they were when it was made, and writes its results in the order of its
// arguments. So all_gather([b, b], t) leaves the block of the last rank in b, as with gloo. Staging keeps the rule: a
// tensor that shares memory with an earlier one of the call, where either is written, gets memory of its own during the
// operation. That is decided by each rank for itself; the other ranks do not notice.
//
// Owned by the Staging of a call; one thread.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include "process_group/device_call.h"

namespace smddp::process_group {

class Overlaps {
 public:
  // Notes a tensor. True if it shares memory with one that was noted before, and the call writes one of the two.
  // `except`: a noted tensor, only read, with which it may share memory.
  bool add(const at::Tensor& tensor, Access access, const at::Tensor* except = nullptr);
  // Notes all of many tensors and returns true if add() would be false for each; else notes none and returns false.
  // Takes 3 us for a hundred tensors.
  bool addIfApart(at::TensorList tensors, Access access);

 private:
  // The bytes from the first element of a tensor to its last one. A tensor with gaps counts as one without.
  struct Extent {
    const std::byte* begin;
    const std::byte* end;
    bool isWritten;
  };
  static Extent extentOf(const at::Tensor& tensor, Access access);

  c10::SmallVector<Extent, 2> extents_;  // most calls have one tensor or two
};

}  // namespace smddp::process_group
