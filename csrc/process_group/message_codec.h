// The bytes of a message, which consists of a header and tensors; they are the same over smddp and other backends.
//
// A message is a *front*, and after it the bytes of each large tensor, uncopied. The front is:
//
//   u32 bytes of the header, u32 number of tensors, u32 bytes of the front, u32 does it end the step on its stream?
//   the header
//   per tensor: u8 kind, i8 dtype (c10::ScalarType), u8 does it require a gradient?, u8 number of dimensions;
//     kind 0 (there is no tensor): nothing else
//     kind 1 (a small tensor): its sizes, i64 each; its dimensions, u8 each, from the largest stride to the smallest;
//       its elements
//     kind 2 (a large tensor): the same without the elements
//     kind 3 (a sparse tensor): its sizes; u8 layout (c10::Layout), u8 is it coalesced?; then its dense parts,
//       tensors like those above: indices and values (COO), or compressed indices, plain indices and values (CSR, CSC,
//       BSR, BSC)
//
// So a tensor arrives with its strides (channels_last stays that), unless it has gaps: then they are those of clone().
// For example sizes 2, 3, 4 and strides 12, 1, 3 travel as 2, 3, 4 and 0, 2, 1, and 24 elements as they lie in memory.
// A tensor is small if its elements and those of the small ones before it have at most 4 KiB together. All numbers are
// in the byte order of the host, and nothing is padded. The front may be sent in parts of any length: its first
// kFrontPrefix bytes say how long it is.
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
  std::vector<at::Tensor> largeTensors;  // the bytes of each large tensor; they share its memory
};

struct DecodedMessage {
  std::string header;
  std::vector<std::optional<at::Tensor>> tensors;
  std::vector<at::Tensor>
      largeTensors;  // where the bytes of each large tensor have to be received, in order
  bool last = false;
};

// Encodes a message; the memory of its front has at least `least` bytes. A tensor that does not lie in one piece of
// host memory is copied there first. No large tensor may change until the message has left. Throws for nested,
// quantized and "meta" tensors.
EncodedMessage encodeMessage(const std::string& header,
                             const std::vector<std::optional<at::Tensor>>& tensors, bool last,
                             size_t least);

// The length of a front in bytes, read from its first kFrontPrefix bytes; there may be more. Throws if there are fewer.
size_t frontLength(std::span<const std::byte> begin);

// Decodes a whole front; bytes after its end are ignored. Throws if the front is damaged.
DecodedMessage decodeFront(std::span<const std::byte> front);

// The thread may be one on which the user's code has switched on torch dispatch modes, so these two functions must not
// use the dispatcher.
// A new tensor of `size` uninitialised bytes.
at::Tensor newBytes(size_t size);
// Bytes of the memory of a tensor without gaps, as a tensor that shares it.
at::Tensor byteView(const at::Tensor& tensor, int64_t begin, int64_t length);

}  // namespace smddp::process_group
