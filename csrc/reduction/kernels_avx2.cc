// Compiled with -mavx2 -mf16c; nothing here may run before the processor was asked.
#include "reduction/kernels.inl.h"

const smddp::reduction::KernelTable smddp::reduction::kAvx2Kernels = kTable;
