#include "cuda/opened_memory.h"

#include <map>
#include <mutex>
#include <utility>

#include "common/log.h"
#include "cuda/library.h"

namespace smddp::cuda {
namespace {

struct Registry {
  std::recursive_mutex mutex;  // open() may destroy the last holder, which takes it again
  std::map<std::pair<uint64_t, uint64_t>, std::weak_ptr<OpenedMemory>> byAddress;
};

Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

}  // namespace

std::shared_ptr<OpenedMemory> OpenedMemory::open(const DeviceTable& table, int device,
                                                 uint64_t process, const MemoryName& name) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  auto& entry = all.byAddress[{process, name.base}];
  if (const auto known = entry.lock()) {
    if (known->is(name)) return known;
    known->close();
  }
  std::erase_if(all.byAddress,
                [&](const auto& one) { return &one.second != &entry && one.second.expired(); });
  void* base = nullptr;
  check(table, table.open(device, name.handle, &base), "opening memory of another rank");
  const auto opened = std::make_shared<OpenedMemory>(table, device, name.allocation, base);
  entry = opened;
  return opened;
}

OpenedMemory::~OpenedMemory() {
  const std::lock_guard lock(registry().mutex);
  close();
}

void OpenedMemory::close() {
  if (base_ == nullptr) return;
  if (const int error = table_.close(device_, std::exchange(base_, nullptr)); error != 0) {
    SMDDP_LOG(Debug, "cuda", "closing memory of another rank: {}", table_.textOf(error));
  }
}

}  // namespace smddp::cuda
