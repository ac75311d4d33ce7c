#include "process_group/device/sources.h"

#include "common/log.h"
#include "cuda/library.h"
#include "process_group/process_group.h"

namespace smddp::process_group::device {
namespace {

constexpr const char* kTag = "process_group";

std::span<std::byte> bytesAt(const cuda::MemoryRange& range) {
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
  if (isRefused_) return false;
  engine_->requireUsable();
  Source source{{}, tensor.device().index(), false};
  const auto begin = reinterpret_cast<uint64_t>(tensor.data_ptr());
  // Some memory lies in no allocation of its own: a range of virtual addresses (expandable_segments) has many
  // allocations, and the driver numbers its pools in another way.
  if (table_->rangeOf(source.device, tensor.data_ptr(), &source.range) != 0 ||
      begin + tensor.nbytes() > source.range.base + source.range.bytes) {
    SMDDP_LOG(Debug, kTag, "a tensor is sent through memory of the host: it lies in no allocation");
    return false;
  }
  if (const auto known = find(source)) return *known;
  engine_->progress().call([&] { enter(source); });
  return find(source).value_or(false);
}

std::optional<bool> DeviceSources::find(const Source& source) {
  const std::lock_guard lock(mutex_);
  const auto known = sources_.find(source.range.base);
  if (known == sources_.end() || known->second.range.allocation != source.range.allocation) {
    return std::nullopt;
  }
  return known->second.isRegistered;
}

void DeviceSources::enter(Source source) {
  using Kind = transport::DeviceMemory::Kind;
  if (isRefused_ || find(source)) return;  // another thread was first
  forgetFreed();
  try {
    const std::string refusal = engine_->process().addDeviceSource(
        {bytesAt(source.range), table_->isCuda ? Kind::Cuda : Kind::Host, source.device});
    if (!refusal.empty()) return refuse(refusal);
    source.isRegistered = true;
    SMDDP_LOG(Debug, kTag, "{} bytes of GPU memory are registered with the network",
              source.range.bytes);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::Resource) throw;
    SMDDP_LOG(Warn, kTag, "what lies in {} bytes of GPU memory is sent through the host: {}",
              source.range.bytes, error.what());
  }
  const std::lock_guard lock(mutex_);
  sources_[source.range.base] = source;
}

void DeviceSources::forgetFreed() {
  const std::lock_guard lock(mutex_);
  const auto numFreed = std::erase_if(sources_, [&](const auto& entry) {
    const Source& source = entry.second;
    cuda::MemoryRange now;
    const auto* const begin = reinterpret_cast<const void*>(source.range.base);
    const bool lives = table_->rangeOf(source.device, begin, &now) == 0 &&
                       now.allocation == source.range.allocation;
    if (!lives) engine_->process().removeDeviceSource(bytesAt(source.range));
    return !lives;
  });
  if (numFreed == 0) return;
  SMDDP_LOG(Debug, kTag, "{} allocations of GPU memory that were registered have been freed",
            numFreed);
}

void DeviceSources::refuse(const std::string& why) {
  isRefused_ = true;
  SMDDP_LOG(Warn, kTag,
            "GPU tensors are sent to other nodes through memory of the host, whatever "
            "SMDDP_GPU_DIRECT says: {}",
            why);
}

}  // namespace smddp::process_group::device
