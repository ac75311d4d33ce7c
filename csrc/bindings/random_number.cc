#include "bindings/random_number.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

namespace smddp::bindings {

void bindRandomNumber(pybind11::module_& m) {
  m.def(
      "random_number",
      [](uint64_t below) {
        const at::Generator& generator = at::detail::getDefaultCPUGenerator();
        auto* numbers = at::check_generator<at::CPUGeneratorImpl>(generator);
        const std::lock_guard lock(numbers->mutex_);
        return numbers->random64() % below;
      },
      pybind11::arg("below"));
}

}  // namespace smddp::bindings
