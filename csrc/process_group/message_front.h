// Reads the front of a message (message_codec.h says what it consists of). It does not know torch, so that a fuzzer
// with sanitizers can run it: torch itself is not instrumented.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "bootstrap/blob.h"

namespace smddp::process_group {

// The first bytes of a front.
struct FrontHead {
  uint32_t header = 0;   // bytes
  uint32_t tensors = 0;  // how many
  uint32_t total = 0;    // bytes of all of the front
  uint32_t last = 0;
};

struct TensorHead {
  enum Kind : uint8_t { None, Small, Large, Sparse };
  Kind kind = None;
  int8_t type = 0;  // c10::ScalarType
  uint8_t requiresGrad = 0;
  uint8_t dimensions = 0;
};

// What a front says about one tensor. Its strides and bytes can be computed without an overflow.
struct TensorFront {
  TensorHead head;
  std::vector<int64_t> sizes = {};
  std::vector<uint8_t> order = {};  // dense: the dimensions from the largest stride to the smallest
  std::span<const std::byte> elements = {};  // small: part of the front
  uint8_t layout = 0;                        // sparse
  bool coalesced = false;                    // sparse
  std::vector<TensorFront> parts = {};       // sparse
};

struct MessageFront {
  std::string_view header;  // part of the front
  bool last = false;
  std::vector<std::optional<TensorFront>> tensors;
};

// What the reader has to know about torch's numbers for types and layouts.
struct TensorFacts {
  size_t (*elementBytes)(int8_t type);  // 0: no such type
  size_t (*parts)(uint8_t layout);      // 0: no layout of sparse tensors
};

class FrontReader {
 public:
  FrontReader(std::span<const std::byte> front, const TensorFacts& facts)
      : left_(front), facts_(facts) {}

  FrontHead head() {
    FrontHead head;
    for (uint32_t* field : {&head.header, &head.tensors, &head.total, &head.last}) {
      *field = number<uint32_t>();
    }
    return head;
  }

  // Bytes after the end are ignored. Throws std::runtime_error if the front is damaged.
  MessageFront message() {
    const FrontHead about = head();
    MessageFront message;
    const auto header = take(about.header);
    message.header = {reinterpret_cast<const char*>(header.data()), header.size()};
    message.last = about.last != 0;
    for (uint32_t i = 0; i < about.tensors; ++i) message.tensors.push_back(tensor());
    return message;
  }

 private:
  static void check(bool right) {
    if (!right) throw std::runtime_error("smp: a message between ranks is damaged");
  }

  std::span<const std::byte> take(size_t count) {
    try {
      return left_.take("a front", count);
    } catch (const bootstrap::BlobError&) {
      check(false);
      throw;
    }
  }

  template <typename Number>
  Number number() {
    Number value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }

  TensorHead tensorHead() {
    const auto kind = number<uint8_t>();
    check(kind <= TensorHead::Sparse);
    TensorHead head{static_cast<TensorHead::Kind>(kind), number<int8_t>(), number<uint8_t>(),
                    number<uint8_t>()};
    check(kind == TensorHead::None || facts_.elementBytes(head.type) > 0);
    return head;
  }

  std::optional<TensorFront> tensor() {
    TensorFront tensor{.head = tensorHead()};
    if (tensor.head.kind == TensorHead::None) return std::nullopt;
    if (tensor.head.kind != TensorHead::Sparse) return dense(std::move(tensor));
    tensor.sizes = sizes(tensor.head);
    tensor.layout = number<uint8_t>();
    tensor.coalesced = number<uint8_t>() != 0;
    const size_t parts = facts_.parts(tensor.layout);
    check(parts > 0);
    for (size_t i = 0; i < parts; ++i) {
      TensorFront part{.head = tensorHead()};
      check(part.head.kind == TensorHead::Small || part.head.kind == TensorHead::Large);
      tensor.parts.push_back(dense(std::move(part)));
    }
    return tensor;
  }

  TensorFront dense(TensorFront tensor) {
    tensor.sizes = sizes(tensor.head);
    std::vector<bool> seen(tensor.head.dimensions);
    for (size_t d = 0; d < seen.size(); ++d) {
      const auto dimension = number<uint8_t>();
      check(dimension < seen.size() && !seen[dimension]);
      seen[dimension] = true;
      tensor.order.push_back(dimension);
    }
    const size_t bytes = bytesOf(tensor);
    if (tensor.head.kind == TensorHead::Small) tensor.elements = take(bytes);
    return tensor;
  }

  std::vector<int64_t> sizes(const TensorHead& head) {
    std::vector<int64_t> sizes;
    for (int d = 0; d < head.dimensions; ++d) {
      sizes.push_back(number<int64_t>());
      check(sizes.back() >= 0);
    }
    return sizes;
  }

  size_t bytesOf(const TensorFront& tensor) const {
    int64_t bytes = static_cast<int64_t>(facts_.elementBytes(tensor.head.type));
    for (const int64_t size : tensor.sizes) {
      // As strides are computed: empty dimensions count as one.
      check(!__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes));
    }
    return std::ranges::count(tensor.sizes, 0) > 0 ? 0 : static_cast<size_t>(bytes);
  }

  bootstrap::BlobReader left_;
  TensorFacts facts_;
};

}  // namespace smddp::process_group
