// Compiled with -mavx512{f,bw,dq,vl} -mf16c; nothing here may run before the processor was asked.
#include "reduction/kernels.inl.h"

const smddp::reduction::KernelTable smddp::reduction::kAvx512Kernels = kTable;
