// Checks the arguments of calls before anything moves, and words the errors.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>
#include <vector>

#include "engine/calls/request.h"

namespace smddp::process_group {

// The operation's name in torch.distributed, for errors: "all_reduce".
using OpName = const char*;

// A dense tensor with memory, with any strides, on the CPU or on a device.
void requireDense(OpName op, const at::Tensor& tensor);
// A dense tensor of which no two elements share memory, so that it can take a result.
void requireWritable(OpName op, const at::Tensor& tensor);
// Exactly one tensor, as c10d's single-device calls have it.
const at::Tensor& onlyTensor(OpName op, const std::vector<at::Tensor>& tensors);
void requireSameType(OpName op, const at::Tensor& a, const at::Tensor& b);
// `whole` has `parts` times the elements of `part`.
void requireMultiple(OpName op, const at::Tensor& whole, const at::Tensor& part, int64_t parts,
                     const char* wholeName, const char* partName);
// One tensor per rank, all of the type of `like`; their sizes may differ from it.
void requireList(OpName op, const std::vector<at::Tensor>& list, size_t count,
                 const at::Tensor& like, const char* listName);
// All of the list have the number of elements of `like`.
bool sameSizes(const std::vector<at::Tensor>& list, const at::Tensor& like);
void requireSameSizes(OpName op, const std::vector<at::Tensor>& list, const at::Tensor& like,
                      const char* listName);
// The only list of a call. A rank that does not take part gives no list, or an empty one.
const std::vector<at::Tensor>& onlyList(OpName op,
                                        const std::vector<std::vector<at::Tensor>>& lists,
                                        bool takesPart, const char* listName);
// How many elements of a tensor belong to each rank. `splits` counts rows of dimension 0; without splits the parts are
// equal. Example: a tensor of 3 x 4 elements with splits {1, 2} has 4 and 8.
std::vector<int64_t> elementsPerRank(OpName op, const at::Tensor& tensor,
                                     const std::vector<int64_t>& splits, int64_t size,
                                     const char* name);
void requireRank(OpName op, int64_t rank, int64_t size, const char* what);

// The type for a reduction. Throws TypeError for types that can be moved, but not reduced: float8, quantized, bits and
// others.
DataType reducibleType(OpName op, const at::Tensor& tensor);
ReduceOp reduceOpOf(OpName name, const c10d::ReduceOp& op);
// Sets op and factor; throws TypeError where the type does not have the operation.
void setReduceOp(OpName name, const c10d::ReduceOp& op, DataType type,
                 engine::calls::Request& request);

[[noreturn]] void notImplemented(OpName op, const std::string& detail = "");

}  // namespace smddp::process_group
