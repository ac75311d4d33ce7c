// Compiled with -mavx2 -mf16c. Nothing here may run before the processor was checked (kernelsOf).
#include "reduction/kernels.inl.h"

const smddp::reduction::KernelTable smddp::reduction::kAvx2Kernels = kTable;
