// The baseline of the architecture: SSE2 on x86-64, NEON on aarch64.
#include "reduction/kernels.inl.h"

const smddp::reduction::KernelTable smddp::reduction::kScalarKernels = kTable;
