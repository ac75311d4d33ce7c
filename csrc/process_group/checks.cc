#include "process_group/checks.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <stdexcept>

#include "engine/process/capabilities.h"

namespace smddp::process_group {
namespace {

template <typename... Args>
[[noreturn]] void valueError(OpName op, fmt::format_string<Args...> format, Args&&... args) {
  throw std::invalid_argument(
      fmt::format("smddp: {}: {}", op, fmt::format(format, std::forward<Args>(args)...)));
}

template <typename... Args>
[[noreturn]] void typeError(OpName op, fmt::format_string<Args...> format, Args&&... args) {
  C10_THROW_ERROR(TypeError, fmt::format("smddp: {}: {}", op,
                                         fmt::format(format, std::forward<Args>(args)...)));
}

std::string shapeOf(const at::Tensor& tensor) {
  return c10::str(c10::toString(tensor.scalar_type()), " tensor of shape ", tensor.sizes());
}

double factorOf(OpName name, const c10d::ReduceOp& op) {
  const auto* given = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (given == nullptr) valueError(name, "PREMUL_SUM without a factor");
  const at::Tensor& factor = given->tensor_factor;
  if (!factor.defined()) return given->double_factor;
  if (factor.numel() != 1 || factor.is_complex()) {
    valueError(name, "the factor of PREMUL_SUM must be one real number, got a {}", shapeOf(factor));
  }
  return factor.item<double>();
}

// "SUM, PRODUCT"
std::string operationsOf(DataType type) {
  std::string names;
  for (int i = 0; i < kNumReduceOps; ++i) {
    const auto op = static_cast<ReduceOp>(i);
    if (!engine::process::canReduce(type, op)) continue;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", toString(op));
  }
  return names;
}

// A view can reach beyond its storage: if the storage was resized, or if the type has several elements in a byte.
void requireStorage(OpName op, const at::Tensor& tensor) {
  const auto needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                       tensor.itemsize(), tensor.storage_offset());
  const size_t bytes = tensor.storage().nbytes();
  if (tensor.numel() > 0 && needed > bytes) {
    valueError(op, "a {} reaches beyond the {} bytes of its storage", shapeOf(tensor), bytes);
  }
}

// Whether two elements of a tensor lie in the same place.
bool sharesElements(const at::Tensor& tensor) {
  const at::MemOverlap overlap = at::has_internal_overlap(tensor);
  if (overlap != at::MemOverlap::TooHard) return overlap == at::MemOverlap::Yes;
  // Dimensions by their strides. If each steps over all that the smaller ones reach, all elements are apart: sizes
  // (2, 3) with strides (10, 3) reach elements 0 to 6, then 10 to 16.
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 1;
  bool areApart = true;
  for (const auto& [stride, size] : dims) {
    areApart = areApart && stride >= reach;
    reach += (size - 1) * stride;
  }
  if (areApart || tensor.numel() == 0) return false;
  // More elements than places: two of them share one.
  if (tensor.numel() > reach) return true;
  // Rare: (2, 3) with strides (3, 2) has elements 0, 2, 4, 3, 5, 7, which are apart.
  std::vector<int64_t> offsets{0};
  for (const auto& [stride, size] : dims) {
    const size_t before = offsets.size();
    for (int64_t i = 1; i < size; ++i) {
      for (size_t o = 0; o < before; ++o) offsets.push_back(offsets[o] + i * stride);
    }
  }
  std::sort(offsets.begin(), offsets.end());
  return std::adjacent_find(offsets.begin(), offsets.end()) != offsets.end();
}

}  // namespace

void notImplemented(OpName op, const std::string& detail) {
  C10_THROW_ERROR(NotImplementedError, fmt::format("smddp: {} is not implemented{}{}", op,
                                                   detail.empty() ? "" : ": ", detail));
}

void requireDense(OpName op, const at::Tensor& tensor) {
  if (!tensor.defined()) valueError(op, "a tensor is undefined");
  if (tensor.layout() != c10::kStrided) {
    valueError(op, "a tensor has layout {}; make it dense with to_dense()",
               c10::str(tensor.layout()));
  }
  // A device with streams can be copied from and to. (Meta tensors have no memory.)
  if (!tensor.device().is_cpu() &&
      (tensor.device().is_meta() || !c10::impl::hasDeviceGuardImpl(tensor.device().type()))) {
    notImplemented(op, c10::str("for tensors on ", tensor.device(), "; move them to the CPU"));
  }
  requireStorage(op, tensor);
}

void requireWritable(OpName op, const at::Tensor& tensor) {
  requireDense(op, tensor);
  if (sharesElements(tensor)) {
    valueError(op, "elements of a {} share memory (strides {}); pass tensor.contiguous()",
               shapeOf(tensor), c10::str(tensor.strides()));
  }
}

const at::Tensor& onlyTensor(OpName op, const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != 1) valueError(op, "expects one tensor per rank, got {}", tensors.size());
  return tensors.front();
}

void requireSameType(OpName op, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == b.scalar_type()) return;
  typeError(op, "all tensors of a call must have one dtype, got {} and {}",
            c10::toString(a.scalar_type()), c10::toString(b.scalar_type()));
}

void requireMultiple(OpName op, const at::Tensor& whole, const at::Tensor& part, int64_t parts,
                     const char* wholeName, const char* partName) {
  requireSameType(op, whole, part);
  if (whole.numel() == part.numel() * parts) return;
  valueError(op,
             "the {} must have {} times the elements of the {} (one part per rank), got {} and {}",
             wholeName, parts, partName, whole.numel(), part.numel());
}

void requireList(OpName op, const std::vector<at::Tensor>& list, size_t count,
                 const at::Tensor& like, const char* listName) {
  if (list.size() != count) {
    valueError(op, "the {} must have one tensor per rank ({}), got {}", listName, count,
               list.size());
  }
  for (const at::Tensor& tensor : list) {
    requireDense(op, tensor);
    requireSameType(op, tensor, like);
  }
}

bool sameSizes(const std::vector<at::Tensor>& list, const at::Tensor& like) {
  return std::all_of(list.begin(), list.end(),
                     [&](const at::Tensor& tensor) { return tensor.numel() == like.numel(); });
}

void requireSameSizes(OpName op, const std::vector<at::Tensor>& list, const at::Tensor& like,
                      const char* listName) {
  for (const at::Tensor& tensor : list) {
    if (tensor.numel() == like.numel()) continue;
    valueError(op, "all tensors of the {} must have {} elements, got {}", listName, like.numel(),
               tensor.numel());
  }
}

const std::vector<at::Tensor>& onlyList(OpName op,
                                        const std::vector<std::vector<at::Tensor>>& lists,
                                        bool takesPart, const char* listName) {
  static const std::vector<at::Tensor> none;
  if (takesPart) {
    if (lists.size() != 1) valueError(op, "expects one {}, got {}", listName, lists.size());
    return lists.front();
  }
  const bool empty =
      std::all_of(lists.begin(), lists.end(), [](const auto& list) { return list.empty(); });
  if (!empty) valueError(op, "only the root rank has an {}", listName);
  return none;
}

std::vector<int64_t> elementsPerRank(OpName op, const at::Tensor& tensor,
                                     const std::vector<int64_t>& splits, int64_t size,
                                     const char* name) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    if (rows % size != 0) {
      valueError(op, "{} rows of the {} do not divide among {} ranks; pass its split sizes", rows,
                 name, size);
    }
    return std::vector<int64_t>(static_cast<size_t>(size), tensor.numel() / size);
  }
  if (static_cast<int64_t>(splits.size()) != size) {
    valueError(op, "the {} needs one split size per rank ({}), got {}", name, size, splits.size());
  }
  int64_t sum = 0;
  for (const int64_t split : splits) {
    if (split < 0) valueError(op, "a split size of the {} is negative: {}", name, split);
    if (__builtin_add_overflow(sum, split, &sum)) {
      valueError(op, "the split sizes of the {} add up to more than 2^63, but it has {} rows", name,
                 rows);
    }
  }
  if (sum != rows) {
    valueError(op, "the split sizes of the {} add up to {}, but it has {} rows", name, sum, rows);
  }
  std::vector<int64_t> elements;
  for (const int64_t split : splits) {
    elements.push_back(rows == 0 ? 0 : split * (tensor.numel() / rows));
  }
  return elements;
}

void requireRank(OpName op, int64_t rank, int64_t size, const char* what) {
  if (rank < 0 || rank >= size) valueError(op, "{} rank {} is not in 0 … {}", what, rank, size - 1);
}

DataType reducibleType(OpName op, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return DataType::float32;
    case at::kDouble: return DataType::float64;
    case at::kHalf: return DataType::float16;
    case at::kBFloat16: return DataType::bfloat16;
    case at::kComplexFloat: return DataType::complex64;
    case at::kComplexDouble: return DataType::complex128;
    case at::kChar: return DataType::int8;
    case at::kShort: return DataType::int16;
    case at::kInt: return DataType::int32;
    case at::kLong: return DataType::int64;
    case at::kByte: return DataType::uint8;
    case at::kUInt16: return DataType::uint16;
    case at::kUInt32: return DataType::uint32;
    case at::kUInt64: return DataType::uint64;
    case at::kBool: return DataType::boolean;
    default: break;
  }
  typeError(op, "{} can be moved, but not reduced; convert the tensor, to float32 for example",
            c10::toString(tensor.scalar_type()));
}

ReduceOp reduceOpOf(OpName name, const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM: return ReduceOp::SUM;
    case c10d::ReduceOp::AVG: return ReduceOp::AVG;
    case c10d::ReduceOp::PRODUCT: return ReduceOp::PRODUCT;
    case c10d::ReduceOp::MIN: return ReduceOp::MIN;
    case c10d::ReduceOp::MAX: return ReduceOp::MAX;
    case c10d::ReduceOp::BAND: return ReduceOp::BAND;
    case c10d::ReduceOp::BOR: return ReduceOp::BOR;
    case c10d::ReduceOp::BXOR: return ReduceOp::BXOR;
    case c10d::ReduceOp::PREMUL_SUM: return ReduceOp::PREMUL_SUM;
    default: valueError(name, "an unknown reduce operation");
  }
}

void setReduceOp(OpName name, const c10d::ReduceOp& op, DataType type,
                 engine::calls::Request& request) {
  request.op = reduceOpOf(name, op);
  if (!engine::process::canReduce(type, request.op)) {
    typeError(name, "{} of {} is undefined; {} has {}", toString(request.op), toString(type),
              toString(type), operationsOf(type));
  }
  if (request.op == ReduceOp::PREMUL_SUM) request.factor = factorOf(name, op);
}

}  // namespace smddp::process_group
