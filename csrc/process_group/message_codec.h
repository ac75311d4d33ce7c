// How a message of a header and tensors looks in bytes, the same for every way that it may travel.
//
// A message is a *front*, and after it each large tensor by itself, uncopied. The front is:
//
//   u32 bytes of the header, u32 number of tensors, u32 bytes of the front, u32 does it end the step on its stream?
//   the header
//   per tensor: u8 kind, i8 dtype (c10::ScalarType), u8 does it require a gradient?, u8 number of dimensions;
//     unless there is none (kind 0): its sizes, i64 each; if it is short (kind 1): its elements
//
// All numbers are in the byte order of the host, and nothing is padded. A transport may cut the front as it likes:
// its first kFrontPrefix bytes say how long it is.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace smddp::process_group {

constexpr size_t kFrontPrefix = 16;

struct EncodedMessage {
  // Has at least `least` bytes; the message's front is the first `length` of them.
  at::Tensor front;
  size_t length = 0;
  std::vector<at::Tensor> alone;  // the bytes of each large tensor; they share its memory
};

struct DecodedMessage {
  std::string header;
  std::vector<std::optional<at::Tensor>> tensors;
  std::vector<at::Tensor>
      alone;  // where the bytes of each large tensor have to be received, in order
  bool last = false;
};

// Encodes a message into memory of at least `least` bytes. A tensor that is not dense memory of the host
// is copied there first; nothing in `tensors` may change until the message is gone.
EncodedMessage encodeMessage(const std::string& header,
                             const std::vector<std::optional<at::Tensor>>& tensors, bool last,
                             size_t least);

// The length of a front, from its first kFrontPrefix bytes or more.
size_t frontLength(std::span<const std::byte> begin);

// Decodes a whole front; bytes after its end are ignored.
DecodedMessage decodeFront(std::span<const std::byte> front);

// Uninitialised bytes, and some bytes of a dense tensor's memory, as a tensor. The thread may be one on which the
// user's code has switched on torch dispatch modes, so these functions must not use the dispatcher.
at::Tensor newBytes(size_t size);
at::Tensor bytesOf(const at::Tensor& tensor, int64_t begin, int64_t length);

}  // namespace smddp::process_group
