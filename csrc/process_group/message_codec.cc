#include "process_group/message_codec.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

namespace smddp::process_group {

namespace {

// Small tensors are those that have at most this many bytes together; they are copied into the front. A large one
// travels by itself.
constexpr size_t kSmallBytes = 4096;

// The first bytes of a front.
struct Front {
  uint32_t header = 0;   // bytes
  uint32_t tensors = 0;  // how many
  uint32_t total = 0;    // bytes of all of the front
  uint32_t last = 0;
};
static_assert(sizeof(Front) == kFrontPrefix);

struct Description {
  enum Kind : uint8_t { None, Small, Large };
  Kind kind = None;
  int8_t type = 0;  // c10::ScalarType
  uint8_t requiresGrad = 0;
  uint8_t dimensions = 0;
};

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

// The tensor, or a copy of it that lies in one piece of host memory. Throws if it cannot be sent.
at::Tensor sendable(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_meta(),
              "a parameter that lives on another rank cannot be sent from this one");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided && !tensor.is_quantized(),
                   "smp cannot send tensors of ", tensor.dtype(), ", ", tensor.layout(),
                   " between ranks");
  // Those of other classes, such as fake ones, have a shape alone: what they refer to is not memory.
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

void check(bool right) { TORCH_CHECK(right, "smp: a message between ranks is damaged"); }

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}
  std::span<const std::byte> raw(size_t size) {
    check(size <= left_.size());
    const auto begin = left_.first(size);
    left_ = left_.subspan(size);
    return begin;
  }
  template <typename Value>
  Value value() {
    Value value;
    std::memcpy(&value, raw(sizeof(value)).data(), sizeof(value));
    return value;
  }

 private:
  std::span<const std::byte> left_;
};

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

EncodedMessage encodeMessage(const std::string& header,
                             const std::vector<std::optional<at::Tensor>>& tensors, bool last,
                             size_t least) {
  const c10::InferenceMode guard(false);
  Writer writer;
  writer.bytes().reserve(kSmallBytes + least);
  Front front{narrowed(header.size()), narrowed(tensors.size()), 0, last};
  writer.value(front);
  writer.raw(header.data(), header.size());
  EncodedMessage message;
  size_t small = 0;
  for (const auto& tensor : tensors) {
    Description about;
    if (!tensor) {
      writer.value(about);
      continue;
    }
    const at::Tensor data = sendable(*tensor);
    const bool isSmall = small + data.nbytes() <= kSmallBytes;
    about = {isSmall ? Description::Small : Description::Large,
             static_cast<int8_t>(data.scalar_type()), tensor->requires_grad(),
             static_cast<uint8_t>(data.dim())};
    writer.value(about);
    for (const int64_t size : data.sizes()) writer.value(size);
    for (const uint8_t dimension : orderOf(data.strides())) writer.value(dimension);
    if (isSmall) {
      small += data.nbytes();
      writer.raw(data.const_data_ptr(), data.nbytes());
    } else {
      message.largeTensors.push_back(byteView(data, 0, static_cast<int64_t>(data.nbytes())));
    }
  }
  auto& bytes = writer.bytes();
  message.length = bytes.size();
  front.total = narrowed(bytes.size());
  std::memcpy(bytes.data(), &front, sizeof(front));
  message.front = newBytes(std::max(bytes.size(), least));
  std::memcpy(message.front.mutable_data_ptr(), bytes.data(), bytes.size());
  return message;
}

size_t frontLength(std::span<const std::byte> begin) { return Reader(begin).value<Front>().total; }

DecodedMessage decodeFront(std::span<const std::byte> bytes) {
  const c10::InferenceMode guard(false);
  Reader reader(bytes);
  const auto front = reader.value<Front>();
  const auto header = reader.raw(front.header);
  DecodedMessage message;
  message.header.assign(reinterpret_cast<const char*>(header.data()), header.size());
  message.last = front.last != 0;
  for (uint32_t i = 0; i < front.tensors; ++i) {
    const auto about = reader.value<Description>();
    auto& place = message.tensors.emplace_back();
    if (about.kind == Description::None) continue;
    check(about.kind <= Description::Large);
    check(about.type >= 0 && about.type < static_cast<int8_t>(at::ScalarType::Undefined));
    std::vector<int64_t> sizes;
    for (int d = 0; d < about.dimensions; ++d) {
      sizes.push_back(reader.value<int64_t>());
      check(sizes.back() >= 0);
    }
    std::vector<uint8_t> order;
    std::vector<bool> seen(about.dimensions);
    for (int d = 0; d < about.dimensions; ++d) {
      order.push_back(reader.value<uint8_t>());
      check(order.back() < about.dimensions && !seen[order.back()]);
      seen[order.back()] = true;
    }
    place = at::detail::empty_strided_cpu(sizes, stridesOf(sizes, order),
                                          static_cast<at::ScalarType>(about.type));
    if (about.kind == Description::Small) {
      const auto elements = reader.raw(place->nbytes());
      if (!elements.empty()) {
        std::memcpy(place->mutable_data_ptr(), elements.data(), elements.size());
      }
    } else {
      message.largeTensors.push_back(byteView(*place, 0, static_cast<int64_t>(place->nbytes())));
    }
    place->set_requires_grad(about.requiresGrad != 0);
  }
  return message;
}

}  // namespace smddp::process_group
