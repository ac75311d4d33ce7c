// How a message of a header and tensors looks in bytes, the same for every way that it may travel.
//
// A message is a *front*, and after it each large tensor by itself, uncopied. The front is:
//
//   u32 bytes of the header, u32 number of tensors, u32 bytes of the front, u32 is it the last of its stream?
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
  at::Tensor front;  // bytes; longer than `length` if that is less than what the caller asked for
  size_t length = 0;
  std::vector<at::Tensor> alone;  // the bytes of each large tensor; they share its memory
};

struct DecodedMessage {
  std::string head;
  std::vector<std::optional<at::Tensor>> tensors;
  std::vector<at::Tensor>
      alone;  // where the bytes of each large tensor have to be received, in order
  bool last = false;
};

// Encodes a message into a front with memory for at least `least` bytes. A tensor that is not dense memory of the host
// is copied there first; nothing in `tensors` may change until the message is gone.
EncodedMessage encodeMessage(const std::string& head,
                             const std::vector<std::optional<at::Tensor>>& tensors, bool last,
                             size_t least);

// The length of a front, from its first kFrontPrefix bytes or more.
size_t frontLength(std::span<const std::byte> begin);

// Decodes a whole front; bytes behind its end are passed over.
DecodedMessage decodeFront(std::span<const std::byte> front);

// Uninitialised bytes, and some bytes of a dense tensor's memory, as a tensor. They do not enter torch's dispatcher: the
// thread may be within modes of the code that waits on it.
at::Tensor newBytes(size_t size);
at::Tensor bytesOf(const at::Tensor& tensor, int64_t begin, int64_t length);

}  // namespace smddp::process_group
