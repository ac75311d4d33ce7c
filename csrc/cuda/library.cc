#include "cuda/library.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "common/error.h"

namespace smddp::cuda {
namespace {

const DeviceTable& open(const std::string& path) {
  if (path.empty()) {
    raise(ErrorKind::Resource,
          "this smddp was built without its CUDA part: build it again where nvcc is installed");
  }
  // It is never unloaded, since streams may run its kernels until the process ends.
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    raise(ErrorKind::Resource, "the CUDA part cannot be loaded: {}", dlerror());
  const auto function = reinterpret_cast<TableFunction>(dlsym(library, kTableSymbol));
  if (function == nullptr) {
    raise(ErrorKind::Resource, "{} is no CUDA part of smddp: it has no {}", path, kTableSymbol);
  }
  const DeviceTable& table = *function();
  // Every version has the first two fields.
  if (table.version != kTableVersion || table.bytes != sizeof(DeviceTable)) {
    raise(ErrorKind::Resource,
          "{} belongs to another smddp (its interface is version {}, this one needs {}): install "
          "both from one wheel, or "
          "build again",
          path, table.version, kTableVersion);
  }
  return table;
}

}  // namespace

const DeviceTable& loadLibrary(const std::string& path) {
  static std::mutex mutex;
  static auto* const loaded = new std::map<std::string, const DeviceTable*>;
  const std::lock_guard lock(mutex);
  const DeviceTable*& table = (*loaded)[path];
  if (table == nullptr) table = &open(path);
  return *table;
}

void check(const DeviceTable& table, int error, const char* what) {
  if (error != 0) raise(ErrorKind::Transport, "{}: {}", what, table.textOf(error));
}

}  // namespace smddp::cuda
