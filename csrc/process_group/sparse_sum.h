// Sum of sparse tensors (COO) over the ranks of a group.
//
//   all_gather of (shape, number of non-zeros)   a plan; the error names two ranks whose shapes differ
//   each rank sends its non-zeros to all others  messages, matched by tag, so that their order does not matter
//   sum in the order of ranks                    so all ranks get the same bits
//
// Threads: begin() by the caller; the rest on the threads that complete the parts. Owns all that it uses, and itself
// until the last part has ended. The first error ends the call, and the tensor stays as it was.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "engine/engine.h"

namespace smddp::process_group {

class SparseSum : public std::enable_shared_from_this<SparseSum> {
 public:
  SparseSum(std::shared_ptr<engine::Engine> engine, std::shared_ptr<engine::groups::Group> group,
            at::Tensor tensor, int32_t tag, Nanoseconds timeout);
  // The completion ends when the tensor has the sum.
  engine::calls::CompletionPtr begin();

 private:
  // Headers of all ranks are gathered before a rank knows how many dimensions the others have, so they have a fixed
  // size. 29 is more than tensors have; nothing else depends on it.
  static constexpr int64_t kMaxDims = 29;
  // Dtype, number of sparse dimensions, of non-zeros and of all dimensions; the size of each dimension.
  using Header = std::array<int64_t, 4 + kMaxDims>;

  Header header() const;
  void exchange();
  void add();
  // Runs `step`, unless one of the parts has failed; an exception ends the call.
  void proceed(const std::vector<engine::calls::CompletionPtr>& parts, void (SparseSum::*step)());
  void end(std::optional<Error> error);

  const std::shared_ptr<engine::Engine> engine_;
  const std::shared_ptr<engine::groups::Group> group_;
  const at::Tensor tensor_;
  const at::Tensor mine_;  // coalesced
  const int32_t tag_;
  const Nanoseconds timeout_;
  const engine::calls::CompletionPtr done_ = std::make_shared<engine::calls::Completion>();
  Header header_{};
  std::vector<Header> headers_;      // by rank
  std::vector<at::Tensor> indices_;  // by rank
  std::vector<at::Tensor> values_;
};

}  // namespace smddp::process_group
