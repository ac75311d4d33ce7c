// Compiled with -mavx512{f,bw,dq,vl} -mf16c. Nothing here may run before the processor was checked (kernelsOf).
#include "reduction/kernels.inl.h"

const smddp::reduction::KernelTable smddp::reduction::kAvx512Kernels = kTable;
