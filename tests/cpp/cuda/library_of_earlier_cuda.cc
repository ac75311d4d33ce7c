// The CUDA part a second time, as CUDA before 12.5 compiles it, for the same test.
#define CUDART_VERSION 12040
#define smddp_device_table smddp_device_table_of_earlier_cuda
#include "cuda/kernels/library.cu"
