#include "common/random.h"

#include <random>

namespace smddp {

uint64_t randomNumber() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

}  // namespace smddp
