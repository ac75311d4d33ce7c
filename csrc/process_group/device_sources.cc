#include "process_group/device_sources.h"

#include <utility>
#include <vector>

#include "common/log.h"
#include "cuda/library.h"
#include "process_group/process_group.h"

namespace smddp::process_group {
namespace {

constexpr const char* kTag = "process_group";

std::span<std::byte> bytesOf(const cuda::MemoryRange& range) {
  return {reinterpret_cast<std::byte*>(range.base), range.bytes};
}

}  // namespace

DeviceSources& DeviceSources::shared(const std::string& library) {
  static auto* const it = new DeviceSources(library);
  return *it;
}

DeviceSources::DeviceSources(const std::string& library) : engine_(sharedEngine()) {
  try {
    table_ = &cuda::loadLibrary(library);
  } catch (const Error& error) {
    refuse(error.what());
  }
}

bool DeviceSources::add(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  if (isRefused_) return false;
  Source source{{}, tensor.device().index()};
  // Not all of a device's memory is in allocations: ranges of virtual addresses (expandable_segments) are not.
  if (table_->rangeOf(source.device, tensor.data_ptr(), &source.range) != 0) {
    SMDDP_LOG(Debug, kTag, "a tensor is sent through memory of the host: it lies in no allocation");
    return false;
  }
  const auto known = sources_.find(source.range.base);
  if (known != sources_.end() && known->second.range.allocation == source.range.allocation) {
    return true;
  }
  forgetFreed();
  const std::string refusal = enter(source);
  if (!refusal.empty()) return refuse(refusal);
  SMDDP_LOG(Debug, kTag, "{} bytes of GPU memory are registered with the network",
            source.range.bytes);
  sources_[source.range.base] = source;
  return true;
}

std::string DeviceSources::enter(const Source& source) {
  using Kind = transport::DeviceMemory::Kind;
  const bool isCuda = table_->isCuda;
  std::string refusal;
  engine_->call([&] {
    refusal = engine_->process().addDeviceSource(
        {bytesOf(source.range), isCuda ? Kind::Cuda : Kind::Host, source.device});
  });
  return refusal;
}

void DeviceSources::forgetFreed() {
  std::vector<std::span<std::byte>> freed;
  std::erase_if(sources_, [&](const auto& entry) {
    const Source& source = entry.second;
    cuda::MemoryRange now;
    const auto* const begin = reinterpret_cast<const void*>(source.range.base);
    const bool lives = table_->rangeOf(source.device, begin, &now) == 0 &&
                       now.allocation == source.range.allocation;
    if (!lives) freed.push_back(bytesOf(source.range));
    return !lives;
  });
  if (freed.empty()) return;
  SMDDP_LOG(Debug, kTag, "{} allocations of GPU memory that were registered have been freed",
            freed.size());
  engine_->call([&] {
    for (const auto& memory : freed) engine_->process().removeDeviceSource(memory);
  });
}

bool DeviceSources::refuse(const std::string& why) {
  isRefused_ = true;
  SMDDP_LOG(Warn, kTag,
            "GPU tensors are sent to other nodes through memory of the host, whatever "
            "SMDDP_GPU_DIRECT says: {}",
            why);
  return false;
}

}  // namespace smddp::process_group
