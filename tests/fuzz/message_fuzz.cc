// Fuzzes the front of a message of smp, which describes tensors.
#include <cstdlib>
#include <functional>
#include <numeric>

#include "process_group/message_front.h"

namespace {

using namespace smddp::process_group;

// As torch has them: types from 0 to 44, of 1 to 16 bytes; layouts.
constexpr TensorFacts kFacts{
    .elementBytes = [](int8_t type) { return type < 0 || type > 44 ? 0 : size_t{1} << type % 5; },
    .parts = [](uint8_t layout) -> size_t { return layout == 1       ? 2
                                                   : layout % 4 == 2 ? 3
                                                                     : 0; },
};

void check(bool right) {
  if (!right) std::abort();
}

// The sanitizers see that nothing overflows, and that all elements are part of the input.
void readAll(const TensorFront& tensor) {
  check(tensor.head.kind != TensorHead::None);
  check(tensor.sizes.size() == tensor.head.dimensions);
  check(tensor.parts.empty() || tensor.parts.size() == kFacts.parts(tensor.layout));
  for (const TensorFront& part : tensor.parts) {
    check(part.parts.empty());
    readAll(part);
  }
  if (tensor.head.kind == TensorHead::Sparse) return;
  const auto elementBytes = static_cast<int64_t>(kFacts.elementBytes(tensor.head.type));
  check(tensor.order.size() == tensor.sizes.size());
  int64_t stride = elementBytes;
  for (auto dimension = tensor.order.rbegin(); dimension != tensor.order.rend(); ++dimension) {
    stride *= std::max<int64_t>(tensor.sizes.at(*dimension), 1);
  }
  check(stride > 0);
  if (tensor.head.kind != TensorHead::Small) return;
  const int64_t bytes = std::accumulate(tensor.sizes.begin(), tensor.sizes.end(), elementBytes,
                                        [](int64_t all, int64_t size) { return all * size; });
  check(tensor.elements.size() == static_cast<size_t>(bytes));
  unsigned sum = 0;
  for (const std::byte each : tensor.elements) sum += std::to_integer<unsigned>(each);
  volatile unsigned used = sum;
  static_cast<void>(used);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Of exactly this size, so that the sanitizer knows the end.
  const std::vector<std::byte> front(reinterpret_cast<const std::byte*>(data),
                                     reinterpret_cast<const std::byte*>(data) + size);
  try {
    const MessageFront message = FrontReader(front, kFacts).message();
    check(message.header.size() <= front.size());
    for (const auto& tensor : message.tensors) {
      if (tensor) readAll(*tensor);
    }
  } catch (const std::runtime_error&) {
  }
  return 0;
}
