#include "process_group/comm_tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "common/config.h"
#include "engine/shared_engine.h"
#include "process_group/errors.h"

namespace smddp::process_group {
namespace {

using Memory = decltype(std::declval<engine::Engine>().tensorMemory());

struct Block {
  Memory memory;
  void* begin;
};

void freeBlock(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  block->memory->free(block->begin);
}

// A storage asks this for memory when it is made, and when it changes its size.
class CommAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    try {
      auto block =
          std::make_unique<Block>(Block{engine::sharedEngine(settings())->tensorMemory(), nullptr});
      block->begin = block->memory->allocate(std::max<size_t>(bytes, 1));
      void* begin = block->begin;
      return {begin, block.release(), &freeBlock, c10::Device(c10::kCPU)};
    } catch (const Error& error) {
      TORCH_WARN_ONCE("smddp: no communication memory, ordinary memory is used instead (slower): ",
                      error.what());
      return c10::GetCPUAllocator()->allocate(bytes);
    }
  }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

}  // namespace

at::Tensor emptyTensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) {
    notImplemented("communication memory", c10::str("on ", options.device()));
  }
  // Never destroyed: storages refer to it until the end of the process.
  static auto* allocator = new CommAllocator;
  return at::detail::empty_generic(sizes, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   c10::typeMetaToScalarType(options.dtype()), std::nullopt);
}

}  // namespace smddp::process_group
