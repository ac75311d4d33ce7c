// A library of another build, for library_test.cc.
#include "cuda/device_table.h"

#if defined(SMDDP_TEST_OTHER_VERSION)
extern "C" const smddp::cuda::DeviceTable* smddp_device_table() {
  static smddp::cuda::DeviceTable table{};
  table.version = smddp::cuda::kTableVersion + 1;
  table.bytes = sizeof table;
  return &table;
}
#else
extern "C" int nothing_of_smddp() { return 0; }
#endif
