// Everything a collective refuses before anything moves, with the sentence the user reads.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

#include "engine/request.h"

namespace smddp::process_group {

// The operation in the words of torch.distributed, for errors: "all_reduce".
using OpName = const char*;

// A dense CPU tensor whose elements fill one run of memory, in whatever order of dimensions.
void requireDense(OpName op, const at::Tensor& tensor);
// The same in row-major order: its bytes have a meaning for ranks that see them as another shape.
void requireContiguous(OpName op, const at::Tensor& tensor);
// Exactly one tensor, as c10d's single-device calls have it.
const at::Tensor& onlyTensor(OpName op, const std::vector<at::Tensor>& tensors);
void requireSameType(OpName op, const at::Tensor& a, const at::Tensor& b);
// `whole` has `parts` times the elements of `part`.
void requireMultiple(OpName op, const at::Tensor& whole, const at::Tensor& part, int64_t parts,
                     const char* wholeName, const char* partName);
void requireList(OpName op, const std::vector<at::Tensor>& list, size_t count,
                 const at::Tensor& like, const char* listName);
void requireRank(OpName op, int64_t rank, int64_t size, const char* what);

// Throws TypeError for types that are only moved: float8, quantized, bits and the like.
DataType reducibleType(OpName op, const at::Tensor& tensor);
// Sets op and factor; throws TypeError where type and operation do not go together.
void setReduceOp(OpName name, const c10d::ReduceOp& op, DataType type, engine::Request& request);

std::span<std::byte> bytesOf(const at::Tensor& tensor);

[[noreturn]] void notImplemented(OpName op, const std::string& detail = "");

}  // namespace smddp::process_group
