#include "process_group/message_codec.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "process_group/message_front.h"

namespace smddp::process_group {

namespace {

// Small tensors are those that have at most this many bytes together; they are copied into the front. A large one
// travels by itself.
constexpr size_t kSmallBytes = 4096;

static_assert(sizeof(FrontHead) == kFrontPrefix);

at::Tensor newTensor(at::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_cpu(sizes, type);
}

// The dimensions from the largest stride to the smallest.
std::vector<uint8_t> orderOf(at::IntArrayRef strides) {
  std::vector<uint8_t> order(strides.size());
  std::iota(order.begin(), order.end(), uint8_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](uint8_t one, uint8_t other) { return strides[one] > strides[other]; });
  return order;
}

// The strides of a tensor without gaps whose dimensions have this order.
std::vector<int64_t> stridesOf(at::IntArrayRef sizes, const std::vector<uint8_t>& order) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (auto dimension = order.rbegin(); dimension != order.rend(); ++dimension) {
    strides[*dimension] = stride;
    stride *= std::max<int64_t>(sizes[*dimension], 1);
  }
  return strides;
}

bool isSparse(at::Layout layout) {
  return layout == at::kSparse || layout == at::kSparseCsr || layout == at::kSparseCsc ||
         layout == at::kSparseBsr || layout == at::kSparseBsc;
}

// Is it a sparse tensor of torch itself? Those of other classes, such as fake ones, have no parts.
bool hasParts(const at::Tensor& tensor) {
  return isSparse(tensor.layout()) && !tensor.is_meta() &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

const at::SparseTensorImpl& cooOf(const at::Tensor& tensor) {
  return *static_cast<const at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

// The dense parts of a sparse tensor, which share its memory. The last one has its values.
std::vector<at::Tensor> partsOf(const at::Tensor& tensor) {
  if (tensor.layout() == at::kSparse) return {cooOf(tensor).indices(), cooOf(tensor).values()};
  const auto& compressed =
      *static_cast<const at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
  return {compressed.compressed_indices(), compressed.plain_indices(), compressed.values()};
}

// The tensor, or a copy of it that lies in one piece of host memory. Throws if it cannot be sent.
at::Tensor sendable(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_meta(),
              "a parameter that lives on another rank cannot be sent from this one");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided && !tensor.is_quantized(),
                   "smp cannot send tensors of ", tensor.dtype(), ", ", tensor.layout(),
                   " between ranks");
  // Tensors of other classes, such as fake ones, have a shape alone, and no memory that could be sent.
  TORCH_CHECK_TYPE(
      !tensor.key_set().has(c10::DispatchKey::Python) && tensor.has_storage() &&
          (tensor.storage().data() != nullptr || tensor.nbytes() == 0 || !tensor.is_cpu()),
      "smp cannot send a tensor without values between ranks, such as a fake tensor that code has "
      "kept "
      "from a run which shows shapes only, or a tensor of a class of its own that has no memory");
  const bool plain = tensor.is_cpu() && !tensor.is_conj() && !tensor.is_neg();
  if (plain && tensor.is_non_overlapping_and_dense()) return tensor;
  const at::NoGradGuard guard;
  const at::Tensor here = tensor.cpu().resolve_conj().resolve_neg();
  return here.is_non_overlapping_and_dense() ? here : here.clone(at::MemoryFormat::Preserve);
}

// A length in a front. Throws if it has more bits: the receiver would read something else.
uint32_t narrowed(size_t length) {
  TORCH_CHECK_VALUE(
      length <= std::numeric_limits<uint32_t>::max(),
      "smp cannot send a message between ranks whose parts that are not tensors have ", length,
      " bytes: they have to be less than 4 GiB");
  return static_cast<uint32_t>(length);
}

class Writer {
 public:
  void raw(const void* data, size_t size) {
    const auto* begin = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), begin, begin + size);
  }
  template <typename Value>
  void value(const Value& value) {
    raw(&value, sizeof(value));
  }
  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

// A sparse tensor of these parts, whose memory it shares. They may have no values yet, so nothing checks them.
at::Tensor sparseOf(const std::vector<at::Tensor>& parts, at::IntArrayRef sizes, at::Layout layout,
                    bool coalesced) {
  // Dispatch modes of the user's code on this thread are no business of a message.
  const c10::impl::ExcludeDispatchKeyGuard modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  const at::NoGradGuard guard;
  const at::Tensor& values = parts.back();
  if (layout == at::kSparse) {
    return at::_sparse_coo_tensor_unsafe(parts[0], values, sizes, values.options().layout(layout),
                                         coalesced);
  }
  return at::_sparse_compressed_tensor_unsafe(parts[0], parts[1], values, sizes,
                                              values.options().layout(layout));
}

}  // namespace

at::Tensor newBytes(size_t size) { return newTensor({static_cast<int64_t>(size)}, at::kByte); }

at::Tensor byteView(const at::Tensor& tensor, int64_t begin, int64_t length) {
  auto bytes = newTensor({0}, at::kByte);
  at::TensorImpl* part = bytes.unsafeGetTensorImpl();
  const auto size = static_cast<int64_t>(tensor.element_size());
  part->set_storage_keep_dtype(tensor.storage());
  part->set_storage_offset(tensor.storage_offset() * size + begin);
  part->set_sizes_contiguous({length});
  return bytes;
}

namespace {

// The description of tensors, and the elements of small ones, go into a front; large ones are collected.
class Encoder {
 public:
  Encoder(Writer& writer, std::vector<at::Tensor>& large) : writer_(writer), large_(large) {}

  void add(const std::optional<at::Tensor>& tensor) {
    if (!tensor) {
      writer_.value(TensorHead{});
    } else if (hasParts(*tensor)) {
      addSparse(*tensor);
    } else {
      addDense(*tensor);
    }
  }

 private:
  void addSparse(const at::Tensor& tensor) {
    describe(TensorHead::Sparse, tensor, tensor);
    for (const int64_t size : tensor.sizes()) writer_.value(size);
    const bool coalesced = tensor.layout() == at::kSparse && cooOf(tensor).coalesced();
    writer_.value(static_cast<uint8_t>(tensor.layout()));
    writer_.value(static_cast<uint8_t>(coalesced));
    for (const auto& part : partsOf(tensor)) addDense(part);
  }

  void addDense(const at::Tensor& tensor) {
    const at::Tensor data = sendable(tensor);
    const bool isSmall = small_ + data.nbytes() <= kSmallBytes;
    describe(isSmall ? TensorHead::Small : TensorHead::Large, data, tensor);
    for (const int64_t size : data.sizes()) writer_.value(size);
    for (const uint8_t dimension : orderOf(data.strides())) writer_.value(dimension);
    if (isSmall) {
      small_ += data.nbytes();
      writer_.raw(data.const_data_ptr(), data.nbytes());
    } else {
      large_.push_back(byteView(data, 0, static_cast<int64_t>(data.nbytes())));
    }
  }

  void describe(TensorHead::Kind kind, const at::Tensor& data, const at::Tensor& tensor) {
    writer_.value(TensorHead{kind, static_cast<int8_t>(data.scalar_type()), tensor.requires_grad(),
                             static_cast<uint8_t>(data.dim())});
  }

  Writer& writer_;
  std::vector<at::Tensor>& large_;
  size_t small_ = 0;
};

constexpr TensorFacts kFacts{
    .elementBytes =
        [](int8_t type) {
          const bool isOne = type >= 0 && type < static_cast<int8_t>(at::ScalarType::Undefined);
          return isOne ? c10::scalarTypeToTypeMeta(static_cast<at::ScalarType>(type)).itemsize()
                       : size_t{0};
        },
    .parts = [](uint8_t layout) -> size_t {
      if (!isSparse(static_cast<at::Layout>(layout))) return 0;
      return static_cast<at::Layout>(layout) == at::kSparse ? 2 : 3;
    },
};

// Makes the tensors that a front describes; the places of large ones are collected.
class Decoder {
 public:
  explicit Decoder(std::vector<at::Tensor>& large) : large_(large) {}

  at::Tensor make(const TensorFront& front) {
    at::Tensor tensor = front.head.kind == TensorHead::Sparse ? sparse(front) : dense(front);
    tensor.set_requires_grad(front.head.requiresGrad != 0);
    return tensor;
  }

 private:
  at::Tensor sparse(const TensorFront& front) {
    std::vector<at::Tensor> parts;
    for (const TensorFront& part : front.parts) parts.push_back(dense(part));
    return sparseOf(parts, front.sizes, static_cast<at::Layout>(front.layout), front.coalesced);
  }

  at::Tensor dense(const TensorFront& front) {
    at::Tensor tensor =
        at::detail::empty_strided_cpu(front.sizes, stridesOf(front.sizes, front.order),
                                      static_cast<at::ScalarType>(front.head.type));
    if (front.head.kind == TensorHead::Large) {
      large_.push_back(byteView(tensor, 0, static_cast<int64_t>(tensor.nbytes())));
    } else if (!front.elements.empty()) {
      std::memcpy(tensor.mutable_data_ptr(), front.elements.data(), front.elements.size());
    }
    return tensor;
  }

  std::vector<at::Tensor>& large_;
};

}  // namespace

EncodedMessage encodeMessage(const std::string& header,
                             const std::vector<std::optional<at::Tensor>>& tensors, bool last,
                             size_t least) {
  const c10::InferenceMode guard(false);
  Writer writer;
  writer.bytes().reserve(kSmallBytes + least);
  FrontHead front{narrowed(header.size()), narrowed(tensors.size()), 0, last};
  writer.value(front);
  writer.raw(header.data(), header.size());
  EncodedMessage message;
  Encoder encoder(writer, message.largeTensors);
  for (const auto& tensor : tensors) encoder.add(tensor);
  auto& bytes = writer.bytes();
  message.length = bytes.size();
  front.total = narrowed(bytes.size());
  std::memcpy(bytes.data(), &front, sizeof(front));
  message.front = newBytes(std::max(bytes.size(), least));
  std::memcpy(message.front.mutable_data_ptr(), bytes.data(), bytes.size());
  return message;
}

size_t frontLength(std::span<const std::byte> begin) {
  return FrontReader(begin, kFacts).head().total;
}

DecodedMessage decodeFront(std::span<const std::byte> bytes) {
  const c10::InferenceMode guard(false);
  const MessageFront front = FrontReader(bytes, kFacts).message();
  DecodedMessage message;
  message.header = front.header;
  message.last = front.last;
  Decoder decoder(message.largeTensors);
  for (const auto& tensor : front.tensors) {
    message.tensors.push_back(tensor ? std::optional(decoder.make(*tensor)) : std::nullopt);
  }
  return message;
}

}  // namespace smddp::process_group
