// Tensors in communication memory (docs/architecture.md, Memory).
#pragma once

#include <ATen/ATen.h>

namespace smddp::process_group {

// A tensor in communication memory. Its storage grows and shrinks as that of any tensor does, and stays in
// communication memory. If there is no room, here or then: ordinary memory, and one warning. CPU only. Any thread.
at::Tensor emptyTensor(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace smddp::process_group
